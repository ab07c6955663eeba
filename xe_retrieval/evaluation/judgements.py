"""Does the score agree with people? Against files of human judgements in the Flickr8k formats.

Experts: `image<TAB>caption_id<TAB>s1<TAB>s2<TAB>s3`, each 1 (unrelated) to 4 (describes it).
Crowd: `image<TAB>caption_id<TAB>share<TAB>yes<TAB>no`, the share of yes and both counts.
"""

import dataclasses
import pathlib

import numpy as np
from scipy import stats

from xe_retrieval.evaluation import precision_recall


@dataclasses.dataclass(frozen=True)
class Judgements:
  images: list[str]  # [P]
  captions: list[str]  # [P] caption ids
  ratings: np.ndarray  # float [P, 3] of the experts, or [P, 1] share of yes
  relevant: np.ndarray  # bool [P], by majority


def read(path):
  """Either format -> Judgements; a line that is neither is an error with its number."""
  if not pathlib.Path(path).is_file():
    raise ValueError(f"{path}: there is no such file")
  images, captions, ratings, relevant = [], [], [], []
  for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").splitlines(), 1):
    if not line.strip():
      continue
    try:
      image, caption, *values = line.split("\t")
      a, b, c = map(float, values)
      experts = {a, b, c} <= {1, 2, 3, 4}
      crowd = 0 <= a <= 1 and b + c > 0 and abs(a - b / (b + c)) < 0.01
      if not experts and not crowd:
        raise ValueError
    except ValueError:
      raise ValueError(
        f"{path}:{number}: expected image, caption_id and either three ratings from 1 to 4 or "
        f"share, yes, no; separated by tabs, not {line!r}"
      ) from None
    images.append(image)
    captions.append(caption)
    ratings.append([a, b, c] if experts else [a])
    relevant.append(sum(x >= 3 for x in (a, b, c)) >= 2 if experts else b > c)
  if not images:
    raise ValueError(f"{path} holds no judgements")
  if len({len(r) for r in ratings}) > 1:
    raise ValueError(f"{path} mixes the ratings of experts and shares of the crowd")
  return Judgements(images, captions, np.array(ratings), np.array(relevant))


def agreement(judgements, pairs):
  """Judgements, Pairs with names -> Kendall's τ_c and τ_b, Spearman, PR-AUC; percent.

  Correlations are over all single ratings, as in the literature; so is leaving out pairs whose
  caption was written for the very image. A pair is relevant if most people say so: two of three
  experts give 3 or 4, or more yes than no. Pairs that the data set does not hold are left out.
  """
  if pairs.images.names is None or pairs.caption_ids is None:
    raise ValueError("judgements need a data set that knows its image names and caption ids")
  image = {name: m for m, name in enumerate(pairs.images.names)}
  caption = {name: q for q, name in enumerate(pairs.caption_ids)}
  known = [
    (p, caption[c], image[i])
    for p, (i, c) in enumerate(zip(judgements.images, judgements.captions, strict=True))
    if i in image and c in caption
  ]
  kept = np.array([k for k in known if pairs.image_of_text[k[1]] != k[2]]).reshape(-1, 3)
  if len(kept) < 2:
    raise ValueError(
      f"of {len(judgements.images)} judged pairs, {len(kept)} are in the data set; the names there "
      f"are like {pairs.images.names[0]!r} and {pairs.caption_ids[0]!r}"
    )
  rows, texts, images = kept.T
  scores = np.einsum("pd,pd->p", pairs.text[texts], pairs.image[images])
  ratings, relevant = judgements.ratings[rows], judgements.relevant[rows]
  flat = np.repeat(scores, ratings.shape[1]), ratings.ravel()
  return {
    "pairs": len(kept),
    "own_captions_left_out": len(known) - len(kept),
    "not_in_data_set": len(judgements.images) - len(known),
    "ratings": ratings.size,
    **_correlations(*flat),
    "relevant": int(relevant.sum()),
    "pr_auc": _percent(precision_recall.average_precision(scores, relevant)),
  }


def _correlations(scores, ratings):
  """[R], [R] -> percent; None where all ratings or all scores are equal."""
  if np.ptp(scores) == 0 or np.ptp(ratings) == 0:
    return dict.fromkeys(("kendall_tau_c", "kendall_tau_b", "spearman"))
  return {
    "kendall_tau_c": _percent(stats.kendalltau(scores, ratings, variant="c").statistic),
    "kendall_tau_b": _percent(stats.kendalltau(scores, ratings, variant="b").statistic),
    "spearman": _percent(stats.spearmanr(scores, ratings).statistic),
  }


def _percent(x):
  return None if np.isnan(x) else 100 * float(x)
