"""Embed in parts: python -m xe_retrieval.embed --workdir=W --images=DIR --out=OUT --part=1/4

Embeds the pictures of a folder, or of a data set (shapes/20000:test), that belong to one of N
parts, and writes their vectors as Parquet files under OUT. Parts need nothing of each other: run
them anywhere that sees the pictures and OUT, at any time, in any order (launch/embed_local.sh,
launch/embed_slurm.sh, launch/embed_kubernetes.yaml); --part=all/4 is a loop over them, and with
--runner they are shared out by Apache Beam, whose own options come after --:

  python -m xe_retrieval.embed --workdir=W --images=DIR --out=OUT --part=all/64 \\
    --runner=FlinkRunner -- --flink_master=host:8081 --parallelism=16

Interrupted or killed, the same command goes on from there; of a part that is done it says so. To
see which parts are done, and to search them:

  python -m xe_retrieval.embed --out=OUT
  python -m xe_retrieval.index --workdir=W --images=OUT --out=INDEX

Exit codes: 0, the part is done (of --out alone: all are); 143 or 130, stopped by SIGTERM or Ctrl-C;
1, something is wrong, or (--out alone) parts are missing.
"""

import functools
import importlib.util
import logging
import signal
import sys

from absl import app, flags

from xe_retrieval import config as config_lib

_SHOWN = 10  # files that are no pictures
_stopped = []  # SIGTERM, once it has come


def embed(workdir, images, out, part, data_dir="", update=False):
  """Embeds the parts that `part` names, and yields a part.Report of each."""
  import xe_retrieval
  from xe_retrieval.embed import directory
  from xe_retrieval.embed import part as parts_lib
  from xe_retrieval.search import image_sources

  numbers, parts = directory.parse_part(part)
  model = xe_retrieval.load(workdir)
  source = image_sources.parse(images, data_dir or model.config.data.dir)
  for number in numbers:
    yield parts_lib.run(model, source, out, number, parts, update)


def main(argv, beam_options=()):
  given = flags.FLAGS
  signal.signal(signal.SIGTERM, _stop)
  try:
    if len(argv) > 1:
      raise ValueError(f"unexpected argument {argv[1]!r}; options of Beam come after --")
    _check(given, beam_options)
    if not given.part:
      sys.exit(_status(given.out))
    arguments = given.workdir, given.images, given.out, given.part, given.data_dir, given.update
    if given.runner:
      if not importlib.util.find_spec("apache_beam"):
        raise ValueError("--runner needs a package: pip install -c constraints.txt -e '.[beam]'")
      quiet = not given["verbosity"].present
      if quiet:
        logging.getLogger().setLevel(logging.ERROR)  # its import warns of extras nobody uses here
      from xe_retrieval.embed import beam_runner

      beam_runner.run(*arguments, given.runner, beam_options, quiet)
      sys.exit(_status(given.out, given.part))
    for report in embed(*arguments):
      _print_skipped(given.out, report.done)
      print(f"{given.out}: {report}", flush=True)
      if _stopped:  # the exception was raised in a callback of a library, which drops it
        raise KeyboardInterrupt
  except BaseException as e:
    # Libraries that are being imported turn the signal's exception into ones of theirs.
    if _stopped or isinstance(e, KeyboardInterrupt):
      print("\nstopped; the same command goes on from there", file=sys.stderr)
      sys.exit(143 if _stopped else 130)
    if isinstance(e, OSError | ValueError):
      sys.exit(f"error: {e}")
    raise


def _stop(number, _):
  _stopped.append(number)
  raise KeyboardInterrupt


def _check(given, beam_options):
  if given.part:
    for name in ("workdir", "images"):
      if not given[name].value:
        raise ValueError(f"--part={given.part} needs --{name}=…")
  elif given.workdir or given.images or given.runner:
    raise ValueError("which part? --part=1/4 is the first of four, --part=all/4 are all of them")
  if beam_options and not given.runner:
    raise ValueError(f"{beam_options[0]} is an option of Beam, which --runner=… starts")


def _status(out, part=""):
  """Prints what is there -> the exit code: of all parts, or of those that `part` names."""
  from xe_retrieval.embed import directory

  found = directory.status(out)
  print(
    f"{out}: {found.done:,} of {found.plan.parts:,} parts are done, {found.pictures:,} pictures, "
    f"{found.skipped:,} files skipped; of {found.plan.source!a} by a model of step "
    f"{found.plan.step}"
  )
  for sentence in found.damaged.values():
    print(sentence)
  if found.missing:
    print(f"missing: {directory.spans(found.missing)}")
  wrong = {*found.missing, *found.damaged}
  return 1 if wrong.intersection(directory.parse_part(part)[0] if part else wrong) else 0


def _print_skipped(out, done):
  from xe_retrieval.data import paths
  from xe_retrieval.embed import directory

  for line in directory.read_skipped(paths.absolute(out), done)[:_SHOWN]:
    print(f"skipped {line['name']!a}: {line['reason']}", file=sys.stderr)
  if done.skipped:
    where = directory.folder(out, done.part, done.parts) / done.skipped_file
    print(f"skipped {done.skipped:,} files, all listed in {where}", file=sys.stderr)


def _define_flags():
  flags.DEFINE_string("workdir", "", "A training run, or an exported model.")
  flags.DEFINE_string("images", "", "Folder, or DATASET:SPLIT.")
  flags.DEFINE_string("out", None, "Directory of the vectors; may be gs://….", required=True)
  flags.DEFINE_string("part", "", "I/N is part I of N, all/N are all; without, what is done.")
  flags.DEFINE_bool("update", False, "Bring a part up to date that is done but has changed.")
  flags.DEFINE_string("data_dir", "", "Where data sets lie; by default where the model's lay.")
  flags.DEFINE_enum(
    "runner",
    None,
    ["DataflowRunner", "DirectRunner", "FlinkRunner", "SparkRunner"],
    "Share parts out by Apache Beam; its own options come after --.",
  )


if __name__ == "__main__":
  _define_flags()
  at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
  app.run(
    functools.partial(main, beam_options=sys.argv[at + 1 :]),
    argv=sys.argv[:at],
    flags_parser=functools.partial(config_lib.parse_flags, remote=("out",)),
  )
