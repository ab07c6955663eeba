"""How often nonsense and foreign queries are told that nothing is relevant, at equal recall.

  python -m benchmarks.nothing_relevant [WORKDIR …] [--data_dir=datasets]

Each model searches the images of its data set's test split. Its threshold is the one that gives it
the stated recall there, so all models find equally much of what is there; and recall is counted in
two ways. `captions`: the share of captions that get an image of which they are true. `pairs`: the
share of captions that get the very image they were written for, which is out of reach of any model
where a caption is vague. Then queries are asked that no image answers: 500 of made-up words, 500
about what no drawn scene shows. The share that gets no result should be high for these.
"""

import argparse
import functools
import random

import numpy as np

import xe_retrieval

RUNS = ("sampled_softmax", "cross_example_softmax")
RECALLS = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  default = [f"runs/quickstart/{name}" for name in RUNS]
  parser.add_argument("workdirs", nargs="*", default=default)
  parser.add_argument("--data_dir", default="")
  args = parser.parse_args()
  for way in ("captions", "pairs"):
    print(f"recall of {way:28}{'recall':>8}{'threshold':>11}{'made-up':>9}{'foreign':>9}")
    shares = {}
    for workdir in args.workdirs:
      for recall, threshold, *told in measure(workdir, args.data_dir, way):
        name = workdir.rstrip("/").rpartition("/")[2]
        row = "".join(f"{100 * x:9.1f}" for x in told)
        print(f"  {name:36}{100 * recall:8.0f}{threshold:11.3f}{row}", flush=True)
        shares.setdefault(recall, []).append(np.mean(told))
    if len(args.workdirs) == 2:
      for recall, (first, second) in shares.items():
        print(f"  at recall {100 * recall:.0f}: {100 * first:.1f} % → {100 * second:.1f} %")


@functools.cache
def scores(workdir, data_dir):
  """-> best score of each foreign query, by kind; of each caption, with what it is true of; own."""
  from xe_retrieval.data import pipeline
  from xe_retrieval.retrieval import embed

  model = xe_retrieval.load(workdir)
  directory = data_dir or model.config.data.dir
  source = pipeline.Source(model.config.data.name, directory, "test")
  pairs = embed.embed(embed.restore(workdir), source)
  own = np.einsum("qd,qd->q", pairs.text, pairs.image[pairs.image_of_text])
  relevant = pairs.relevant(np.arange(len(pairs.text)))  # bool [Q, M]
  true = np.where(relevant, pairs.text @ pairs.image.T, -1).max(axis=1)
  best = [(model.embed_text(q) @ pairs.image.T).max(axis=1) for q in (made_up(500), foreign(500))]
  return best, {"captions": true, "pairs": own}


def measure(workdir, data_dir, way):
  """Yields recall, threshold and the two shares."""
  best, found = scores(workdir, data_dir)
  for recall in RECALLS:
    threshold = np.quantile(found[way], 1 - recall)
    yield recall, threshold, *(float(np.mean(b < threshold)) for b in best)


def made_up(count):
  """Two to six words of random letters."""
  draw = random.Random(0)
  letters = "abcdefghijklmnopqrstuvwxyz"

  def word():
    return "".join(draw.choices(letters, k=draw.randint(3, 9)))

  return [" ".join(word() for _ in range(draw.randint(2, 6))) for _ in range(count)]


def foreign(count):
  """Sentences about the world, in which there is no shape, colour, size or place of the scenes."""
  draw = random.Random(0)
  who = (
    "two dogs", "a horse", "three children", "an old fisherman", "the orchestra", "a ginger cat",
    "a steam train", "our neighbour", "four tourists", "a surgeon", "the football team", "a bee",
  )  # fmt: skip
  does = (
    "running", "asleep", "eating soup", "playing chess", "waiting for the bus", "reading a letter",
    "crossing the river", "repairing a bicycle", "singing", "looking at the sea",
  )  # fmt: skip
  where = (
    "on a beach", "in a crowded market", "under the bridge", "near the airport", "during a storm",
    "behind the church", "in the kitchen", "on a snowy mountain", "at a wedding", "in the rain",
  )  # fmt: skip
  every = [f"{a} {b} {c}" for a in who for b in does for c in where]
  return draw.sample(every, count)


if __name__ == "__main__":
  main()
