"""Index: python -m xe_retrieval.index --workdir=W --images=DIR_or_DATASET:SPLIT --out=I

Embeds every picture under a folder, or every image of a data set (shapes/20000:test), and makes
them searchable. The same command again embeds only what is new or changed and drops what is gone;
another --images is added to those before; --remove takes one out. Interrupted, it goes on where it
was. A running `serve` takes over the new state by itself. Files that are no pictures are skipped
and listed. Several processes share the work (launch/local_processes.sh, --distributed), with --out
on a disk that all see. What python -m xe_retrieval.embed has written is taken as --images, too: the
vectors are there already.

  python -m xe_retrieval.search --index=I "two dogs on a beach"
  python -m xe_retrieval.serve --index=I
"""

import signal
import sys

from absl import app, flags

from xe_retrieval import config as config_lib


def index(
  workdir, images=(), out="", remove=(), data_dir="", kind="auto", rebuild=False, **options
):
  """Brings the index `out` up to date; returns an update.Report, None if only tokens were stored.

  `options` are precision, columns and store, as update_index takes them, and tokens: the workdir
  of a re-ranker, for which the tokens of all images are stored.
  """
  import jax

  import xe_retrieval
  from xe_retrieval.data import paths
  from xe_retrieval.embed import embedded_source
  from xe_retrieval.search import update
  from xe_retrieval.towers import weight_files
  from xe_retrieval.training import processes

  tokens = options.pop("tokens", "")
  if not images and not remove and not rebuild and not tokens:
    raise ValueError("index what? --images=DIR adds a folder, --remove=DIR takes one out")
  if jax.process_count() > 1 and not paths.given(workdir).exists():
    with processes.primary_first("model"):  # a Hugging Face id: one fetches it, the others wait
      weight_files.locate(workdir)
  model = xe_retrieval.load(workdir)
  directory = data_dir or model.config.data.dir
  add = [embedded_source.parse(text, directory, model.fingerprint) for text in images]
  gone = [embedded_source.named(text, directory) for text in remove]
  report = None
  if images or remove or rebuild:
    report = update.update_index(out, model, workdir, add, gone, kind, rebuild, **options)
  if tokens and processes.is_primary():
    from xe_retrieval.search import second_stage

    done, failed = second_stage.index_tokens(out, model, tokens)
    print(f"{out}: tokens of {done:,} images stored" + f", {failed:,} not readable" * bool(failed))
  return report


def main(argv):
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}; a folder is given as --images={argv[1]}")
  from xe_retrieval.training import processes

  f = flags.FLAGS
  with processes.together(f.distributed):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
      options = {"precision": f.precision or "", "columns": f.columns, "store": f.store}
      options["tokens"] = f.tokens
      report = index(f.workdir, f.images, f.out, f.remove, f.data_dir, f.kind, f.rebuild, **options)
    except (OSError, ValueError) as e:
      sys.exit(f"error: {e}")
    except KeyboardInterrupt:
      sys.exit("\nstopped; the same command goes on from there")
  if not processes.is_primary() or report is None:
    return
  for _, name, reason in report.skipped[:10]:
    print(f"skipped {name!a}: {reason}", file=sys.stderr)
  if report.skipped:
    print(f"skipped {len(report.skipped):,} files, all listed in skipped.tsv", file=sys.stderr)
  how = f"{report.embedded:,} embedded now, {report.removed:,} removed"
  print(f"{f.out}: {report.images:,} images" + (f" ({how})" if report.changed else ", up to date"))
  print(f"open it with: python -m xe_retrieval.serve --index={f.out}")


def _define_flags():
  flags.DEFINE_string("workdir", None, "A training run, or an exported model.", required=True)
  flags.DEFINE_multi_string("images", [], "Folder, DATASET:SPLIT or what embed wrote; repeatable.")
  flags.DEFINE_string("out", None, "The index: a directory, new or made by this.", required=True)
  flags.DEFINE_multi_string("remove", [], "Folder or DATASET:SPLIT to take out of the index.")
  flags.DEFINE_string("data_dir", "", "Where data sets lie; by default where the model's lay.")
  flags.DEFINE_enum(
    "kind", "auto", ["auto", "exact", "scann"], "auto: exact below 250,000 images, then ScaNN."
  )
  flags.DEFINE_enum(
    "precision",
    None,
    ["float32", "float16"],
    "Of vectors on disk; float16 halves their size. By default float32, or as the index has it.",
  )
  flags.DEFINE_string(
    "columns",
    "",
    "Table with a column `image`, the name in the source, and others to filter by: "
    ".tsv, .csv, .jsonl or .parquet.",
  )
  flags.DEFINE_string(
    "store", "", "Where vectors lie: files in --out by default, or milvus:URI,NAME."
  )
  flags.DEFINE_string(
    "tokens", "", "Workdir of a re-ranker: what it needs of every image is stored, too."
  )
  flags.DEFINE_bool("rebuild", False, "Embed everything anew, as after training another model.")
  flags.DEFINE_bool(
    "distributed", False, "One of the processes of a SLURM job or TPU pod; JAX finds the others."
  )


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=config_lib.parse_flags)
