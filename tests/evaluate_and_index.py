"""What test_distributed.py runs in its own process and in two others."""

from xe_retrieval import evaluate, index, model
from xe_retrieval.evaluation import score_tiles
from xe_retrieval.training import features, processes


def run(workdir, out):
  """In shards and tiles so small that each process has something to do."""
  model.BATCH = features.BATCH = 16
  model.Encoder.__init__.__defaults__ = (None, 16, None, None)  # the second is the batch
  processes.SHARD, score_tiles.QUERIES, score_tiles.DOCUMENTS = 1, 32, 16
  evaluate.evaluate(workdir, "test", out / "test", distractors=["shapes/64:train"], report=False)
  index.index(workdir, ["shapes/64:test", "shapes/64:train"], out / "index")
