"""A re-ranker for COCO photographs: as configs/flickr8k_rerank.py, for seven times the photos.

  python -m xe_retrieval.main --config=configs/coco_rerank.py --workdir=runs/coco_rerank \
    --config.first_stage=runs/coco
"""

from configs import flickr8k_rerank


def get_config(loss: str = "cross_example_softmax"):
  config = flickr8k_rerank.get_config(loss)
  config.steps = 4_000
  return config
