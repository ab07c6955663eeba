"""Small towers on the embedded data set: minutes on two CPU cores.

python -m xe_retrieval.main --config=configs/quickstart.py:cross_example_softmax --workdir=runs/ce
"""

from configs import cc


def get_config(loss: str = "cross_example_softmax"):
  config = cc.get_config(loss)
  config.steps = 700
  config.batch_size = 128
  if loss.startswith("corrected"):
    # How vague a caption is should show in its scores, so half of the loss sees them as they are.
    config.corrected_share = 0.5
    config.bank.query = config.bank.image = 0.5

  config.data.name = "shapes/20000"
  config.data.dir = "datasets"
  config.data.workers = 0  # pictures of 64 pixels are decoded fast enough by threads
  config.data.augment = "none"

  text = config.text
  text.pretrained = ""
  text.pooling = "mean"  # from scratch, a CLS token learns several times more slowly
  text.dropout = 0.0
  text.tokens = 20
  text.vocab_size = 1_000
  text.layers, text.width, text.heads, text.mlp = 2, 96, 4, 192
  text.learning_rate = 1e-3
  text.warmup_steps = 50

  image = config.image
  image.pretrained = ""
  image.size = 64
  image.stem, image.stem_width, image.block = "patch", 64, "basic"
  image.depths, image.widths = (1, 1), (64, 128)
  image.optimizer = "adamw"
  image.learning_rate, image.end_learning_rate = 2e-3, 0.0
  image.warmup_steps = 50

  config.log_every = 20
  config.eval_every = config.steps  # half-way, running means of BatchNorm lag behind
  config.checkpoint_every = 350
  return config
