"""The headline figures of an embedded data set, in percent as in the paper, and their intervals."""

from xe_retrieval.retrieval import bootstrap, precision_recall, ranks

AT = (1, 5, 10, 100)


def headline(pairs):
  """Pairs -> the first figures of metrics.json."""
  data = (pairs.text, pairs.image, pairs.image_of_text)
  return {
    "queries": len(pairs.text),
    "images": len(pairs.image),
    "pr_auc": 100 * precision_recall.curve(*data).average_precision,
    "text_to_image": summary(ranks.text_to_image(*data)),
    "image_to_text": summary(ranks.image_to_text(*data)),
  }


def summary(rank):
  """int [Q] -> Recall@1/5/10/100 in percent and the median rank (1 = first)."""
  return {f"recall@{k}": ranks.recall_at(rank, k) for k in AT} | {"median_rank": ranks.median(rank)}


def intervals(draws, rank):
  """float32 [S, Q], int [Q] -> [low, high] for each entry of `summary`."""
  recall = {f"recall@{k}": bootstrap.mean(draws, 100.0 * (rank < k)) for k in AT}
  return recall | {"median_rank": bootstrap.median(draws, rank + 1)}
