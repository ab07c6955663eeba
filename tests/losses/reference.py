"""Every loss and its gradients in float64 NumPy, written independently from the papers."""

import numpy as np


def value_and_gradients(
  name,
  text,
  image,
  text_id,
  image_id,
  scale=20.0,
  keep=0.5,
  bias=-10.0,
  softening=5.0,
  correction=0.5,
  corrected_share=1.0,
):
  """float64 value, d/dtext and d/dimage."""
  text, image = np.asarray(text, np.float64), np.asarray(image, np.float64)
  t, i = unit(text), unit(image)
  s = scale * t @ i.T
  negative = (text_id[:, None] != text_id) & (image_id[:, None] != image_id)
  if name == "symmetric":
    value, w = softmax(s, negative, "query", 1.0, None, scale)
    back, w_back = softmax(s.T, negative.T, "query", 1.0, None, scale)
    value, w = (value + back) / 2, (w + w_back.T) / 2
  elif name in SOFTMAX:
    scope, mine, angles = SOFTMAX[name]
    margin = angles and (lambda c: (softening * c + psi(c, angles)) / (1 + softening))
    value, w = softmax(s, negative, scope, keep if mine else 1.0, margin, scale)
  elif name.startswith("corrected_"):
    keep = keep if name.endswith("mining") else 1.0
    value, w = corrected(s, negative, keep, correction)
    plain, w_plain = softmax(s, negative, "batch", keep, None, scale)
    value = corrected_share * value + (1 - corrected_share) * plain
    w = corrected_share * w + (1 - corrected_share) * w_plain
  elif name == "sigmoid":
    value, w = sigmoid(s, negative, bias)
  else:
    value, w = PAIRWISE[name](s, negative, scale)
  return value, through_unit(text, scale * w @ i), through_unit(image, scale * w.T @ t)


SOFTMAX = {
  "sampled_softmax": ("query", False, None),
  "snm": ("query", True, None),
  "l_softmax": ("query", False, 2),
  "a_softmax": ("query", False, 4),
  "cross_example_softmax": ("batch", False, None),
  "cross_example_negative_mining": ("batch", True, None),
}


def softmax(s, negative, scope, keep, margin, scale):
  """Value and the weights d value / d s."""
  n = len(s)
  positive = np.diag(s).copy()
  slope = np.ones(n)
  if margin:
    c, h = positive / scale, 1e-6
    positive, slope = scale * margin(c), (margin(c + h) - margin(c - h)) / (2 * h)
  z = np.zeros((n, n))
  if scope == "batch":
    z[negative] = np.exp(s[negative]) * kept(s[negative], keep)
  else:
    for row in range(n):
      own = negative[row]
      z[row, own] = np.exp(s[row, own]) * kept(s[row, own], keep)
  total = np.full(n, z.sum()) if scope == "batch" else z.sum(1)
  with np.errstate(divide="ignore"):
    value = np.logaddexp(0, np.log(total) - positive).mean()
  p = total / (total + np.exp(positive)) / n  # d value / d log Z of each row
  share = z / np.where(total > 0, total, 1)[:, None]
  w = p.sum() * share if scope == "batch" else p[:, None] * share
  w[np.diag_indices(n)] -= p * slope
  return value, w


def corrected(s, negative, keep, correction):
  """Cross-example softmax of s_ij − correction·(r_i + c_j), by the chain rule."""
  e = np.where(negative, np.exp(s), 0.0)
  by_row, by_column = (np.where(z > 0, z, 1.0) for z in (e.sum(1), e.sum(0)))
  t = s - correction * (np.log(by_row)[:, None] + np.log(by_column))
  value, w = softmax(t, negative, "batch", keep, None, 1.0)
  through_rows = w.sum(1)[:, None] * e / by_row[:, None]
  through_columns = w.sum(0) * e / by_column
  return value, w - correction * (through_rows + through_columns)


def kept(scores, keep):
  """Weight of each score when only the highest ⌈keep·n⌉ count and ties share."""
  if not len(scores):
    return scores
  k = int(np.ceil(keep * len(scores)))
  kth = -np.partition(-scores, k - 1)[k - 1]
  above, equal = scores > kth, scores == kth
  return above + equal * ((k - above.sum()) / equal.sum())


def psi(c, m):
  theta = np.arccos(np.clip(c, -1, 1))
  q = np.floor(theta * m / np.pi)
  return (-1) ** q * np.cos(m * theta) - 2 * q


def sigmoid(s, negative, bias):
  z = np.where(np.eye(len(s), dtype=bool), -(s + bias), s + bias)
  used = negative | np.eye(len(s), dtype=bool)
  sign = np.where(np.eye(len(s), dtype=bool), -1, 1)
  value = np.logaddexp(0, z)[used].sum() / len(s)
  return value, used * sign / (1 + np.exp(-z)) / len(s)


def triplet(s, negative, scale):
  excess = 0.2 * scale + s - np.diag(s)[:, None]
  w = (negative & (excess > 0)) / max(negative.sum(), 1)
  value = (w * excess).sum()
  return value, w - np.diag(w.sum(1))


def contrastive(s, negative, scale):
  w = (negative & (s > 0.2 * scale)) / max(negative.sum(), 1)
  value = (scale - np.diag(s)).mean() + (w * (s - 0.2 * scale)).sum()
  return value, w - np.eye(len(s)) / len(s)


def tcm(s, negative, scale):
  value, w = softmax(s, negative, "query", 1.0, None, scale)
  low = np.eye(len(s), dtype=bool) & (s < 0.9 * scale)
  high = negative & (s > 0.5 * scale)
  for sign, wrong, margin in ((-1, low, 0.9), (1, high, 0.5)):
    if wrong.any():
      value += sign * (s[wrong] / scale - margin).mean()
      w = w + sign * wrong / wrong.sum() / scale
  return value, w


PAIRWISE = {"triplet": triplet, "contrastive": contrastive, "tcm": tcm}


def unit(x):
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def through_unit(x, g):
  """The gradient with respect to x, given the one with respect to its direction."""
  u = unit(x)
  return (g - (g * u).sum(1, keepdims=True) * u) / np.linalg.norm(x, axis=1, keepdims=True)
