"""Image-text retrieval with calibrated scores: Cross-Example Softmax on JAX/Flax."""


def load(path, which="best", revision=""):
  """The model of a workdir (its best or latest checkpoint) or of an exported directory.

  Also a Hugging Face CLIP or SigLIP as it is, its directory or id; or the id of what
  `export --push` has sent to the Hub. `revision` is a commit, tag or branch there.

  model.embed_text(["two dogs on a beach"])        -> float32 [1, D], unit norm
  model.embed_images(["a.jpg", array, pil_image])  -> float32 [3, D], unit norm
  """
  from xe_retrieval import model  # here: keeps `import xe_retrieval` cheap

  return model.load(path, which, revision)
