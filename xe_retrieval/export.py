"""Export a trained model for use elsewhere: python -m xe_retrieval.export --workdir=DIR --out=DIR

Writes Hugging Face directories of both towers, the projections, a serialised jax function per
tower, the calibration of this checkpoint if it was evaluated, and a README.md that says
how to use each, with the figures of its evaluation: the model card. towers/export_format.py defines
the format. --push=USER/NAME sends the directory to the Hugging Face Hub (after `hf auth login`),
from where xe_retrieval.load("USER/NAME", revision=…) reads it. --onnx adds text.onnx and
image.onnx, the same functions for ONNX Runtime, compared with JAX before they are kept. The workdir
of a re-ranker is exported as reranking/export_format.py describes.
"""

import functools
import importlib.util
import pathlib
import sys

from absl import app, flags

from xe_retrieval import config as config_lib
from xe_retrieval.data import paths

ONNX_TOLERANCE = 1e-4  # of unit vectors


def export(workdir, out, which="best", onnx=False):
  """The best (or latest) checkpoint of a workdir as a new directory."""
  if onnx and not all(map(importlib.util.find_spec, ("jax2onnx", "onnxruntime"))):
    raise ValueError("--onnx needs packages: pip install -c constraints.txt -e '.[onnx]'")
  from xe_retrieval import model as models
  from xe_retrieval.calibration import artifact
  from xe_retrieval.report import model_card
  from xe_retrieval.reranking import export_format as second_stage
  from xe_retrieval.reranking import scorer, settings
  from xe_retrieval.towers import bank as banks
  from xe_retrieval.towers import export_format

  out = pathlib.Path(out).expanduser()
  if settings.is_reranker(_config(workdir)):
    return second_stage.write(scorer.restore(workdir, which), workdir, out)
  encoder = models.restore(workdir, which)
  export_format.write(encoder, out)
  fingerprint = encoder.fingerprint()
  if calibration := artifact.read(workdir, fingerprint):
    calibration.write(out)
  elif bank := banks.read(workdir, fingerprint):
    bank.write(out / banks.NAME)
  model_card.write(workdir, out, encoder.config)
  if onnx:
    _write_onnx(encoder, out)
  return out


def _config(workdir):
  """That of a workdir; {} where there is none: what reads it next says so."""
  path = paths.given(workdir) / "config.json"
  return config_lib.from_json(path.read_text()) if path.exists() else {}


def push(out, name, private=False) -> str:
  """An exported directory -> a model on the Hugging Face Hub; returns its commit."""
  import huggingface_hub

  api = huggingface_hub.HfApi()
  try:
    api.create_repo(name, private=private, exist_ok=True)
    return api.upload_folder(repo_id=name, folder_path=out, commit_message="Exported").oid
  except (OSError, ValueError) as e:  # HfHubHTTPError and HFValidationError are such
    raise ValueError(f"--push={name}: {str(e).splitlines()[0]} (is `hf auth login` done?)") from e


def _write_onnx(encoder, out):
  """text.onnx and image.onnx, for any batch size."""
  import jax
  import jax2onnx
  import numpy as np
  import onnxruntime

  from xe_retrieval.towers import export_format

  variables, random = jax.device_get(encoder.variables), np.random.default_rng(0)
  functions = export_format.functions(encoder.config, encoder.model, variables)
  for name, (function, shape, dtype) in functions.items():
    path = out / f"{name}.onnx"
    like = jax.ShapeDtypeStruct(("batch", *shape), dtype)
    kept = {"return_mode": "file", "output_path": str(path), "input_names": [name]}
    jax2onnx.to_onnx(function, [like], **kept, output_names=["embedding"])
    session = onnxruntime.InferenceSession(path)
    for rows in (1, 3):
      high = 256 if name == "image" else encoder.tokenizer.vocab_size
      x = random.integers(0, high, (rows, *shape)).astype(dtype)
      wrong = np.abs(session.run(None, {name: x})[0] - np.asarray(function(x))).max()
      if not wrong <= ONNX_TOLERANCE:
        path.unlink()
        raise ValueError(f"{path} would differ from JAX by {wrong:.1e}: it was not kept")


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; the run is named as --workdir={argv[1]}")
  try:
    f = flags.FLAGS
    out = export(f.workdir, f.out, f.checkpoint, f.onnx)
    pushed = push(out, f.push, f.private) if f.push else ""
  except ValueError as e:
    sys.exit(f"error: {e}")
  for path in sorted(p for p in out.rglob("*") if p.is_file()):
    print(f"{path.stat().st_size / 2**20:9.2f} MB  {path}")
  if pushed:
    print(f'pushed: xe_retrieval.load("{f.push}", revision="{pushed}")')


def _define_flags():
  """Not on import: commands share flag names, and all can be imported together."""
  flags.DEFINE_string("workdir", None, "The workdir of a training run.", required=True)
  flags.DEFINE_string("out", None, "The directory to write; new or empty.", required=True)
  flags.DEFINE_enum("checkpoint", "best", ["best", "latest"], "Which checkpoint to export.")
  flags.DEFINE_string("push", "", "USER/NAME of a model on the Hugging Face Hub to send it to.")
  flags.DEFINE_bool("private", False, "A model that --push makes is private.")
  flags.DEFINE_bool("onnx", False, "Also text.onnx and image.onnx; needs the extra onnx.")


if __name__ == "__main__":
  _define_flags()
  parse = functools.partial(config_lib.parse_flags, remote=("workdir",))
  app.run(main, flags_parser=parse)
