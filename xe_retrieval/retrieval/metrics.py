"""The headline figures of an embedded data set, in percent as in the paper."""

from xe_retrieval.retrieval import precision_recall, ranks

AT = (1, 5, 10, 100)


def headline(pairs, distractors=None):
  """Pairs, [N, D] or a list of such -> the figures of metrics.json."""
  data = (pairs.text, pairs.image, pairs.image_of_text)
  forward = ranks.text_to_image(*data, distractors)
  backward = ranks.image_to_text(*data)
  return {
    "queries": len(pairs.text),
    "images": len(pairs.image),
    "pr_auc": 100 * precision_recall.curve(*data, distractors).average_precision,
    "text_to_image": summary(forward),
    "image_to_text": summary(backward),
  }


def summary(rank):
  """int [Q] -> Recall@1/5/10/100 in percent and the median rank (1 = first)."""
  return {f"recall@{k}": ranks.recall_at(rank, k) for k in AT} | {"median_rank": ranks.median(rank)}
