"""Make the CLIP (or SigLIP) you have calibrated, on your own pairs.

  python -m xe_retrieval.main --config=configs/clip.py --config.pretrained=DIR_or_id \
    --config.data.name=captions/mine --workdir=runs/mine

Both towers stay frozen and are run once; their features are cached. Step 0 is the pretrained model:
projections start as its own, and the loss at its scale. The scores are corrected by a bank of
training captions and images, as in configs/flickr8k.py. The settings were not tuned.
"""

from configs import cc


def get_config(loss: str = "corrected_cross_example_softmax"):
  config = cc.get_config(loss)
  config.pretrained = "openai/clip-vit-base-patch32"
  config.scale = 0.0  # the model's own
  config.steps = 500
  config.batch_size = 1_024
  config.loss_implementation = "streaming"
  config.data.name = "captions/mine"
  config.data.dir = "datasets"
  config.data.augment = "none"  # else features could not be cached
  config.bank.query = config.bank.image = 0.5

  for tower in (config.text, config.image):
    tower.freeze = "all"
    tower.optimizer = "adamw"
    # Small: it starts from a model that was trained on far more pairs.
    tower.learning_rate, tower.end_learning_rate = 1e-4, 0.0
    tower.weight_decay = 0.0  # would pull towards zero, away from the pretrained projection
    tower.warmup_steps = 50
  config.text.tokens = 0  # as many as the model knows

  config.log_every = 50
  config.eval_every = config.checkpoint_every = config.steps
  config.keep_checkpoints = 1
  return config
