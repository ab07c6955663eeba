"""Search: python -m xe_retrieval.search --index=I "two dogs on a beach" [--min_probability=0.8]

Prints the images that are relevant, each with the probability that it is and its score; or that
nothing is relevant. What is returned is asked for in one of four ways:

  --min_probability=0.5   each result is relevant with at least this probability (the default)
  --max_wrong=1           a query gets at most so many irrelevant images in the mean
  --min_precision=0.8     of all results of many queries, this share is relevant; with --guarantee
                          the lower confidence bound of that share reaches it
  --threshold=0.3         each result has at least this score

Several queries: as further arguments, or one per line of --queries=FILE (- is standard input, and
each line is answered as it comes). --image=FILE searches for images like a picture; with words too,
they decide what is relevant, and --weight how much they matter for the order, from 0 to 1.
--folder, --since and --until search some of the images, and so does --filter='source == "holiday"
and year > 2020'; --order=date shows the newest first. --rerank=W2 has a re-ranker read the first
--candidates of each query and order them; results then are the likely ones among these.
Exit code: 0 if any query has a result, 1 if nothing is relevant, 2 if something is wrong.
"""

import datetime
import json
import queue
import sys
import threading

from absl import app, flags

from xe_retrieval import config as config_lib

_BATCH = 256  # lines answered at once
_ASKED = (
  *("min_probability", "max_wrong", "min_precision", "threshold", "guarantee"),
  *("top", "offset", "weight", "folder", "order", "filter"),
)


def main(argv):
  f = flags.FLAGS
  queries = argv[1:]
  try:
    if (queries and f.queries) or not (queries or f.queries or f.image):
      raise ValueError(
        'search for what? "words in quotes", --queries=FILE with one per line, or --image=FILE'
      )
    batches = _batches(_lines(f.queries)) if f.queries else [queries] if queries else None
    asked = {"since": _date(f, "since"), "until": _date(f, "until")}
    asked |= {name: f[name].value for name in _ASKED}
    from xe_retrieval.search import searcher as searchers

    searcher = searchers.open_index(f.index, f.workdir)
    several, any_relevant = bool(f.queries) or len(queries) > 1, False
    for found in _answers(searcher, batches, f, asked):
      any_relevant |= found["relevant"]
      print(json.dumps(found) if f.json else _text(found, several), flush=True)
  except (OSError, ValueError) as e:
    print(f"error: {e}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    sys.exit(130)
  sys.exit(0 if any_relevant else 1)


def _answers(searcher, batches, f, asked):
  if not f.rerank:
    return searcher.answer_batches(batches, f.image or None, **asked)
  for name in ("image", "max_wrong", "min_precision", "guarantee"):
    if f[name].value:
      raise ValueError(f"--{name} is not for --rerank; --min_probability and --threshold are")
  if f.order != "best":
    raise ValueError("--order is not for --rerank, which makes an order")
  from xe_retrieval.search import second_stage

  asked = {k: v for k, v in asked.items() if k not in ("max_wrong", "min_precision", "guarantee")}
  asked = {k: v for k, v in asked.items() if k not in ("weight", "order")}
  return second_stage.SecondStage(searcher, f.rerank, f.candidates).answers(batches, **asked)


def _parse(argv):
  """A wrong flag is 2 too: 1 means that nothing is relevant."""
  try:
    return config_lib.parse_flags(argv)
  except SystemExit as e:
    print(e.code, file=sys.stderr)
    sys.exit(2)


def _date(f, name):
  try:
    return datetime.date.fromisoformat(f[name].value) if f[name].value else None
  except ValueError:
    raise ValueError(f"--{name}={f[name].value} is no date as in 2026-11-18") from None


def _text(found, several):
  lines = [found["query"]] if several else []
  for result in found["results"]:
    shown = "" if result["probability"] is None else f"{100 * result['probability']:5.1f} %  "
    lines.append(f"{shown}{result['score']:6.3f}  {result['image']}")
  if not found["relevant"]:
    lines.append(_nothing(found))
  elif found["total"] is None or found["total"] > len(found["results"]):
    total = "more" if found["total"] is None else f"{found['total']:,} in all"
    lines.append(f"… {total}; --top and --offset show others")
  return "\n".join(lines)


def _nothing(found):
  if found["best_score"] is None:
    return "nothing relevant (no image is in this folder, of these dates and passes the filter)"
  if found["threshold"] is None:
    return "nothing relevant (no threshold reaches what is asked for)"
  if not found["familiar"]:
    like = "; ".join(repr(caption) for caption in found["suggestions"])
    return f"nothing relevant (unlike anything this model was trained on; nearest: {like})"
  best = f"best score {found['best_score']:.2f}, needed {found['threshold']:.2f}"
  if found["best_probability"] is not None:
    best = f"best probability {100 * found['best_probability']:.1f} %, {best}"
  return f"nothing relevant ({best})"


def _lines(path):
  """Non-empty lines of a file, as they come."""
  if path == "-":
    yield from filter(None, (line.strip() for line in sys.stdin))
    return
  with open(path, encoding="utf-8", errors="replace") as file:
    yield from filter(None, (line.strip() for line in file))


def _batches(lines):
  """Lists of what has come so far, at least one line and at most a batch."""
  waiting = queue.Queue(_BATCH)

  def read():
    try:
      for line in lines:
        waiting.put(line)
      waiting.put(None)
    except OSError as e:
      waiting.put(e)

  threading.Thread(target=read, daemon=True).start()
  last = ""
  while isinstance(last, str):
    batch = [waiting.get()]
    while len(batch) < _BATCH and not waiting.empty():
      batch.append(waiting.get())
    last = batch[-1]
    if lines := [line for line in batch if isinstance(line, str)]:
      yield lines
  if last:
    raise last


def _define_flags():
  flags.DEFINE_string("index", None, "What python -m xe_retrieval.index made.", required=True)
  flags.DEFINE_float("min_probability", None, "That each result is relevant; 0.5 by default.", 0, 1)
  flags.DEFINE_float("max_wrong", None, "Irrelevant results of a query, in the mean.", 0)
  flags.DEFINE_float("min_precision", None, "Share of all results that are relevant.", 0, 1)
  flags.DEFINE_bool("guarantee", False, "The lower bound of the precision must reach it.")
  flags.DEFINE_float("threshold", None, "Score that results have at least.", -1, 1)
  flags.DEFINE_integer("top", 20, "At most so many results per query.", 1, 10_000)
  flags.DEFINE_integer("offset", 0, "Skips so many results: those that were shown before.", 0)
  flags.DEFINE_string("image", "", "Picture file: the images most like it.")
  flags.DEFINE_float("weight", 0.5, "Of the words, where there is an --image too.", 0, 1)
  flags.DEFINE_string("folder", "", "Only images of this source or folder, as in photos/2019.")
  flags.DEFINE_string("since", "", "Only images changed on this day or later, as in 2026-11-18.")
  flags.DEFINE_string("until", "", "Only images changed on this day or before.")
  flags.DEFINE_string(
    "filter",
    "",
    'Only images that match, as in source == "holiday" and year > 2020: == != < <= > >=, in [a, '
    'b], like "a%", and, or, not, parentheses, on source, folder, name, date, year and columns '
    "of index --columns.",
  )
  flags.DEFINE_enum("order", "best", ["best", "date"], "date: the newest of the relevant first.")
  flags.DEFINE_string("rerank", "", "Workdir of a re-ranker, for which index --tokens was run.")
  flags.DEFINE_integer("candidates", 128, "With --rerank: images that it reads per query.", 1)
  flags.DEFINE_bool("json", False, "One JSON object per query and line.")
  flags.DEFINE_string("queries", "", "File with one query per line; - is standard input.")
  flags.DEFINE_string("workdir", "", "Where the model is, if it was moved.")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=_parse)
