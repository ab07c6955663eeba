"""TensorFlow as this project uses it: an input pipeline on the host, never on an accelerator."""

import os

# Silences the report that there is no GPU. (Not setdefault: importing jax has set it to 1.)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

for kind in ("GPU", "TPU"):
  tf.config.set_visible_devices([], kind)
