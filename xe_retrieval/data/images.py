"""Encoded pictures → uint8 squares, in TensorFlow graphs."""

from xe_retrieval.data.cpu_tensorflow import tf

AUGMENTS = ("none", "random_resized_crop")


def square(encoded, size: int):
  """Shorter side to `size`, then the centre; string [] -> uint8 [size, size, 3]."""
  image = _decode(encoded)
  height, width = tf.unstack(tf.shape(image)[:2])
  side = tf.minimum(height, width)
  return _resize(
    tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side),
    size,
  )


def random_resized_crop(encoded, size: int, seed):
  """A crop of 20–100 % of the area, never mirrored: "left" must stay left."""
  shape = tf.io.extract_jpeg_shape(encoded) if _is_jpeg(encoded) else tf.shape(_decode(encoded))
  begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
    shape,
    tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
    seed=seed,
    min_object_covered=0.0,
    aspect_ratio_range=(3 / 4, 4 / 3),
    area_range=(0.2, 1.0),
    use_image_if_no_bounding_boxes=True,
  )
  return _resize(tf.slice(_decode(encoded), begin, tf.stack([extent[0], extent[1], 3])), size)


def _is_jpeg(encoded):
  return tf.image.is_jpeg(encoded)


def _decode(encoded):
  image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
  image.set_shape((None, None, 3))
  return image


def _resize(image, size):
  same = tf.reduce_all(tf.shape(image)[:2] == size)
  resized = lambda: tf.cast(  # noqa: E731
    tf.round(tf.clip_by_value(tf.image.resize(image, (size, size), antialias=True), 0, 255)),
    tf.uint8,
  )
  return tf.ensure_shape(tf.cond(same, lambda: image, resized), (size, size, 3))
