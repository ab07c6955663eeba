"""clip-retrieval's back end on the same vectors, for benchmarks/serve.py --clip_retrieval=PYTHON.

It needs other versions of many libraries, so PYTHON is that of an environment of its own, with
`pip install clip-retrieval 'setuptools<81'`. There this file runs as a script and serves
KnnService, the search endpoint, as `clip-retrieval back` does: Flask, a flat faiss index (exact,
what autofaiss takes for so few vectors as well), Parquet for the file names. No CLIP is loaded:
clients send vectors, so that no text tower is in its times.
"""

import importlib
import json
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

COLUMNS = ["image_path"]


class Server:
  """The back end as a subprocess of `python`, over float32 [n, width] in `folder`/vectors.npy."""

  def __init__(self, python, folder, port):
    self.command, self.port = [python, __file__, str(folder), str(port)], port

  def __enter__(self):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    self.process = subprocess.Popen(self.command, **quiet)
    while True:
      if self.process.poll() is not None:
        raise SystemExit(f"clip-retrieval does not start: {' '.join(self.command)}")
      try:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/indices-list"):
          return self.port
      except (urllib.error.URLError, OSError):
        time.sleep(0.2)

  def __exit__(self, *_):
    self.process.terminate()
    self.process.wait()


def request(vector, top):
  """The bytes of a search for [width]."""
  question = {"embedding_input": vector.tolist(), "modality": "image", "indice_name": "images"}
  body = json.dumps(question | {"num_images": top, "deduplicate": False}).encode()
  head = f"POST /knn-service HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
  return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def serve(folder, port):
  import faiss
  import numpy as np
  import pandas

  # By its name: `from clip_retrieval import clip_back` would give a function.
  clip_back = importlib.import_module("clip_retrieval.clip_back")
  from flask import Flask
  from flask_restful import Api

  vectors = np.load(folder / "vectors.npy")
  index = faiss.IndexFlatIP(vectors.shape[1])
  index.add(vectors)
  names = pandas.DataFrame({"image_path": [f"{i:08d}.jpg" for i in range(len(vectors))]})
  (folder / "metadata").mkdir(exist_ok=True)
  names.to_parquet(folder / "metadata" / "metadata_0.parquet")
  fields = dict.fromkeys(clip_back.ClipResource.__dataclass_fields__)
  found = {"image_index": index, "columns_to_return": COLUMNS, "metadata_is_ordered_by_ivf": False}
  found["metadata_provider"] = clip_back.ParquetMetadataProvider(str(folder / "metadata"))
  resources = {"clip_resources": {"images": clip_back.ClipResource(**fields | found)}}

  app = Flask(__name__)
  api = Api(app)
  api.add_resource(clip_back.KnnService, "/knn-service", resource_class_kwargs=resources)
  names = {"indices": ["images"]}
  api.add_resource(clip_back.IndicesList, "/indices-list", resource_class_kwargs=names)
  app.run(host="127.0.0.1", port=port, debug=False)


if __name__ == "__main__":
  serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
