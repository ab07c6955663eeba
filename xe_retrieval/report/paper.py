"""Results published in the paper (tables 1 and 2; averages of five runs), for comparison."""

PAIRS = {
  "conceptual_captions": "3,318,333 training and 12,559 test pairs",
  "flickr30k": "zero-shot after 3,318,333 training pairs",
}

NAMES = {
  "sampled_softmax": "Sampled Softmax",
  "l_softmax": "L-Softmax",
  "a_softmax": "A-Softmax",
  "snm": "SNM",
  "cross_example_softmax": "Cross-Example Softmax",
  "cross_example_negative_mining": "Cross-Example Negative Mining",
  # Not in the paper:
  "symmetric": "Symmetric (CLIP)",
  "sigmoid": "Sigmoid (SigLIP)",
  "triplet": "Triplet",
  "contrastive": "Contrastive",
  "tcm": "Sampled Softmax + TCM",
  "binary_cross_entropy": "Binary Cross-Entropy",  # of re-rankers
  "corrected_cross_example_softmax": "Corrected Cross-Example Softmax",
  "corrected_cross_example_negative_mining": "Corrected Cross-Example Negative Mining",
}

# PR-AUC; Recall@1, 5, 10 among the test images; Recall@1, 5, 10, 100 with 3.3M distractors.
_CONCEPTUAL_CAPTIONS = {
  "sampled_softmax": (14.61, 25.87, 50.67, 61.12, 1.38, 3.99, 6.16, 20.44),
  "l_softmax": (14.03, 26.18, 50.78, 61.25, 1.38, 4.20, 6.33, 20.72),
  "a_softmax": (14.11, 26.20, 50.98, 61.48, 1.38, 4.18, 6.38, 20.82),
  "snm": (14.80, 26.08, 50.71, 61.41, 1.28, 3.97, 6.08, 20.63),
  "cross_example_softmax": (20.12, 26.95, 50.65, 61.18, 1.55, 4.51, 6.83, 21.54),
  "cross_example_negative_mining": (20.09, 26.91, 50.85, 61.21, 1.57, 4.58, 6.94, 21.62),
}
_FLICKR30K = {
  "sampled_softmax": (29.22, 55.70, 67.20),
  "l_softmax": (29.12, 55.79, 66.95),
  "a_softmax": (28.74, 55.80, 66.96),
  "snm": (29.07, 55.95, 67.27),
  "cross_example_softmax": (29.94, 56.83, 67.78),
  "cross_example_negative_mining": (30.49, 57.04, 68.06),
}


def figures(dataset, loss):
  """Data set name, loss -> the paper's figures, shaped like metrics.json, or None."""
  name = dataset.split("/")[0]
  if name == "conceptual_captions" and loss in _CONCEPTUAL_CAPTIONS:
    area, *recall = _CONCEPTUAL_CAPTIONS[loss]
    near, far = _recall(recall[:3], (1, 5, 10)), _recall(recall[3:], (1, 5, 10, 100))
    return {"pr_auc": area, "text_to_image": near, "distractors": {"text_to_image": far}}
  if name == "flickr30k" and loss in _FLICKR30K:
    return {"text_to_image": _recall(_FLICKR30K[loss], (1, 5, 10))}
  return None


def _recall(values, at):
  return {f"recall@{k}": value for k, value in zip(at, values, strict=True)}
