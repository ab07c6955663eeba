"""Search: python -m xe_retrieval.search --index=I "two dogs on a beach" [--min_precision=0.9]

Prints the images that score above the threshold, each with its score and with the precision to
expect of everything that scores as much; or that nothing is relevant. The threshold is one for all
queries: --threshold gives it as a cosine, --min_precision as what the evaluation of the model
promises; without both it is where the evaluation had the best F1.

Several queries: as further arguments, or one per line of --queries=FILE (- is standard input).
Exit code: 0 if any query has a result, 1 if nothing is relevant, 2 if something is wrong.
"""

import json
import sys

from absl import app, flags

from xe_retrieval import command_line

BATCH = 256  # queries at once


def answer(searcher, found, top) -> dict:
  """Found -> what --json prints."""
  above = min(found.above, top)
  rows, scores = found.rows[:above], found.scores[:above]
  results = [
    {"image": searcher.collection.full_name(row), "score": round(float(score), 4), "precision": p}
    for row, score, p in zip(rows, scores, searcher.precision(scores), strict=True)
  ]
  return {
    "query": found.query,
    "threshold": round(found.threshold, 4),
    "relevant": bool(results),
    "best_score": round(found.best, 4),
    "results": results,
  }


def search(searcher, queries, top=20, min_precision=None, threshold=None):
  """Strings, from a list or as they come -> answers, in batches."""
  cut = searcher.threshold(min_precision, threshold)
  for batch in _batches(queries):
    for found in searcher.search(batch, top, cut):
      yield answer(searcher, found, top)


def main(argv):
  command_line.quieten()
  f = flags.FLAGS
  queries = argv[1:]
  try:
    if bool(queries) == bool(f.queries):
      raise ValueError('search for what? "words in quotes", or --queries=FILE with one per line')
    lines = _lines(f.queries) if f.queries else queries
    from xe_retrieval.retrieval import searcher as searchers

    searcher = searchers.open_index(f.index, f.workdir)
    several, any_relevant = bool(f.queries) or len(queries) > 1, False
    for found in search(searcher, lines, f.top, f.min_precision, f.threshold):
      any_relevant |= found["relevant"]
      print(json.dumps(found) if f.json else _text(found, several), flush=True)
  except (OSError, ValueError) as e:
    print(f"error: {e}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    sys.exit(130)
  sys.exit(0 if any_relevant else 1)


def _parse(argv):
  """A wrong flag is 2 too: 1 means that nothing is relevant."""
  try:
    return command_line.parse(argv)
  except SystemExit as e:
    print(e.code, file=sys.stderr)
    sys.exit(2)


def _text(found, several):
  lines = [found["query"]] if several else []
  for result in found["results"]:
    precision = "" if result["precision"] is None else f"  {100 * result['precision']:5.1f} %"
    lines.append(f"{result['score']:6.3f}{precision}  {result['image']}")
  if not found["relevant"]:
    best, threshold = found["best_score"], found["threshold"]
    lines.append(f"nothing relevant (best score {best:.2f}, threshold {threshold:.2f})")
  return "\n".join(lines)


def _lines(path):
  """Non-empty lines of a file, as they come."""
  if path == "-":
    yield from filter(None, (line.strip() for line in sys.stdin))
    return
  with open(path, encoding="utf-8", errors="replace") as file:
    yield from filter(None, (line.strip() for line in file))


def _batches(queries):
  batch = []
  for query in queries:
    batch.append(query)
    if len(batch) == BATCH:
      yield batch
      batch = []
  if batch:
    yield batch


def _define_flags():
  flags.DEFINE_string("index", None, "What python -m xe_retrieval.index made.", required=True)
  flags.DEFINE_float("min_precision", None, "Precision to expect of the results.", 0, 1)
  flags.DEFINE_float("threshold", None, "Cosine that results have at least.", -1, 1)
  flags.DEFINE_integer("top", 20, "At most so many results per query.", 1, 10_000)
  flags.DEFINE_bool("json", False, "One JSON object per query and line.")
  flags.DEFINE_string("queries", "", "File with one query per line; - is standard input.")
  flags.DEFINE_string("workdir", "", "Where the model is, if it was moved.")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=_parse)
