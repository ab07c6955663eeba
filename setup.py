"""What xe_retrieval needs. Exact, tried-together versions are in constraints.txt."""

import pathlib

from setuptools import find_packages, setup

_PAGES = ("html", "css", "js", "svg")
_BEAM = ["apache-beam>=2.77"]  # prepare and embed --runner=…
_MILVUS = ["pymilvus>=3.0", "milvus-lite>=3.2"]  # index --store=milvus:…; the latter for a file

setup(
  name="xe_retrieval",
  version="0.1.0",
  description="Image-text retrieval with scores that mean something: Cross-Example Softmax on JAX",
  long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  packages=find_packages(include=["xe_retrieval", "xe_retrieval.*"]),
  package_data={"xe_retrieval": [f"{d}/*.{e}" for d in ("report", "serving/page") for e in _PAGES]},
  python_requires=">=3.11",
  install_requires=[
    "absl-py>=2.1",
    "array-record>=0.8",
    "braceexpand>=0.1.7",
    "cachetools>=5.3",
    "chex>=0.1.90",
    "etils[epath]>=1.10",
    "fastapi>=0.115",
    "filelock>=3.13",
    "flax>=0.12,<0.13",
    "httptools>=0.6",
    "huggingface-hub>=1.0",
    "importlib-resources>=6",  # tensorflow-datasets imports it without asking for it
    "jax>=0.10,<0.11",
    "jinja2>=3.1",
    "markupsafe>=2.1",
    "matplotlib>=3.9",
    "ml-collections>=1.1",
    "numpy>=2.0",
    "opencv-python-headless>=4.11",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.12,<0.13",
    "pillow>=10.3",
    "prometheus-client>=0.20",
    "pyarrow>=17",
    "pydantic>=2.7",
    "safetensors>=0.5",
    "scann[tf]>=1.4.2,<1.5",
    "scipy>=1.13",
    "sentencepiece>=0.2",  # the tokenizer of SigLIP
    "snowballstemmer>=2.2",
    "starlette>=0.40",
    # scann 1.4 is built against this one; with 2.21 its import fails on an undefined symbol.
    "tensorflow>=2.20,<2.21",
    "tensorflow-datasets>=4.9.9",
    "threadpoolctl>=3.5",
    "tokenizers>=0.22",
    "tqdm>=4.66",
    "transformers>=5.0,<6",
    "uvicorn>=0.30",
  ],
  extras_require={
    "test": [
      *_BEAM,
      *_MILVUS,
      "gcp-storage-emulator>=2026.7",
      "gcsfs>=2026.1",
      "hypothesis>=6.100",
      "ipykernel>=6.29",
      "nbclient>=0.10",
      "playwright>=1.50",
      "pytest>=8",
      "pytest-xdist>=3.5",
      "pyyaml>=6",
      "ruff>=0.12",
      "schemathesis>=4",
      "scikit-learn>=1.5",
    ],
    "beam": _BEAM,
    "milvus": _MILVUS,
    "bench": ["faiss-cpu>=1.9", "scikit-learn>=1.5", "torch>=2.8"],
    "people": ["eccv_caption>=0.1"],  # human-verified relevance for COCO: evaluate --relevance=eccv
    "cuda": ["jax[cuda13]>=0.10,<0.11"],
    "gcs": ["gcsfs>=2026.1"],  # for workdirs in gs://…; brings google-cloud-storage for Orbax
    "onnx": ["jax2onnx>=0.13"],  # export --onnx; brings onnxruntime
    "tpu": ["jax[tpu]>=0.10,<0.11"],
    "plan": ["jax[tpu]>=0.10,<0.11"],  # the compiler for TPUs, which needs no TPU
  },
)
