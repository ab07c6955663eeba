"""Make the CLIP (or SigLIP) you have calibrated, on your own pairs.

  python -m xe_retrieval.main --config=configs/clip.py:datasets/captions/mine \
    --config.pretrained=DIR_or_id --workdir=runs/mine

After the colon: the directory of the data set that `prepare` made, whose size decides on batch and
steps (else --config.data.name=…, of some 20,000 pairs); a comma and a loss may follow.
Both towers stay frozen and are run once; their features are cached. Step 0 is the pretrained model:
projections start as its own, and the loss at its scale. The scores are corrected by a bank of
training captions and images, as in configs/flickr8k.py.
"""

from configs import cc, own

STEPS = 500
EPOCHS = 25  # at most: with 320 epochs of 400 images a small CLIP became worse than it was


def get_config(argument: str = ""):
  directory, _, loss = argument.partition(",")
  config = cc.get_config(loss or "corrected_cross_example_softmax")
  config.steps, config.batch_size = STEPS, own.BATCH
  config.data.name, config.data.dir = "captions/mine", "datasets"
  if directory:
    images = own.look(config, directory)
    config.steps = min(STEPS, -(-EPOCHS * images // config.batch_size))
  config.pretrained = "openai/clip-vit-base-patch32"
  config.scale = 0.0  # the model's own
  config.loss_implementation = "streaming"
  config.data.augment = "none"  # else features could not be cached
  config.bank.query = config.bank.image = 0.5

  for tower in (config.text, config.image):
    tower.freeze = "all"
    tower.optimizer = "adamw"
    # Small: it starts from a model that was trained on far more pairs.
    tower.learning_rate, tower.end_learning_rate = 1e-4, 0.0
    tower.weight_decay = 0.0  # would pull towards zero, away from the pretrained projection
    tower.warmup_steps = config.steps // 10
  config.text.tokens = 0  # as many as the model knows

  config.log_every = 50
  config.eval_every = config.checkpoint_every = config.steps
  config.keep_checkpoints = 1
  return config
