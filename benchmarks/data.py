"""The input pipeline and `prepare` against the bare decoder on the same bytes.

  python -m benchmarks.data [--pictures=1024] [--repetitions=5] [--train]
  python -m benchmarks.data --only=core [--name=captions/coco --data_dir=datasets]

Repetitions alternate between the two; a ratio compares the fastest of each. --train also runs
twelve steps of a ResNet-50 and prints how long it waited for data.

--only=core measures images per second of CPU time, all threads and worker processes together, which
other programs on the machine change less than they change seconds; the best of the repetitions. It
takes made pictures of three sizes, or a prepared data set.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import tarfile
import tempfile
import time

import numpy as np
from PIL import Image

from configs import cc
from xe_retrieval import main as training
from xe_retrieval import prepare
from xe_retrieval.data import decoding, pipeline, tokenization
from xe_retrieval.data.cpu_tensorflow import tf
from xe_retrieval.preparation import records

THREADS = 2
BATCH = 128
WORDS = (
  *("a", "the", "of", "in", "on", "with", "and"),
  *("man", "woman", "dog", "beach", "street", "red"),
)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--pictures", type=int, default=1024)
  parser.add_argument("--repetitions", type=int, default=5)
  parser.add_argument("--train", action="store_true")
  parser.add_argument("--only", choices=["core"])
  parser.add_argument("--name", default="", help="with --only=core: a prepared data set")
  parser.add_argument("--data_dir", default="datasets")
  args = parser.parse_args()
  print(f"{'':48}{'measured':>12}{'target':>10}")
  with tempfile.TemporaryDirectory() as directory:
    directory = pathlib.Path(directory)
    if args.only and args.name:
      per_core(args.name, args.data_dir, args.pictures, args.repetitions)
    elif args.only:
      for height, width in ((16, 16), (256, 256), (288, 384), (480, 640)):
        name = make_data_set(directory / str(width), args.pictures, height, width)
        per_core(name, str(directory / str(width)), args.pictures, args.repetitions)
    if args.only:
      return
    name = make_data_set(directory, args.pictures)
    feed(name, str(directory), args.repetitions)
    prepare_rate(directory, args.repetitions)
    if args.train:
      wait_for_data(name, str(directory))


def per_core(name, directory, pictures, repetitions):
  """Images per second of CPU time, JPEGs to 224-pixel crops and tokens.

  Pictures of 16 pixels stay that small: what they take is mostly Python, under its global lock.
  """
  source = pipeline.Source(name, directory, "train")
  tokenizer = tokenization.train(source.captions().flat, 1_000, 32)
  height, width = decoding._size(source.image(0))
  size = min(224, height)
  for workers in (0, 1, 2):
    rate = lambda workers=workers: pipeline_rate(  # noqa: E731
      source, tokenizer, "random_resized_crop", cpu_time, workers, size, pictures
    )
    best = measure({"": rate}, repetitions)[""]
    label = f"{height} x {width}, {workers} workers: images per core and s"
    row(label, f"{best:,.0f}")
  row("… cores for 10,000 images/s", f"{10_000 / best:.1f}")


def cpu_time():
  """Seconds of this process, its threads, and the worker processes that it has started."""
  spent = time.process_time()
  for file in pathlib.Path("/proc/self/task").glob("*/children"):
    for pid in file.read_text().split():
      fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
      spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
  return spent


def feed(name, directory, repetitions):
  """Rate of the pipeline over the rate of the decoder, 256-pixel JPEGs to 224-pixel crops."""
  source = pipeline.Source(name, directory, "train")
  captions = list(source.captions().flat)
  tokenizer = tokenization.train(captions, 1_000, 32)
  images = [source.image(n) for n in range(len(source))]
  rates = measure(
    {
      "raw": lambda: decode_rate(images),
      "random_resized_crop": lambda: pipeline_rate(source, tokenizer, "random_resized_crop"),
      "none": lambda: pipeline_rate(source, tokenizer, "none"),
      "tokens": lambda: timed(len(captions), lambda: tokenizer(captions)),
    },
    repetitions,
  )
  size = np.mean([len(encoded) for encoded in images]) / 1024
  row(f"decoder alone, {THREADS} threads, {size:.0f} KB JPEGs", f"{rates['raw']:,.0f}/s")
  for augment in ("random_resized_crop", "none"):
    row(f"pipeline / decoder, {augment}", f"{rates[augment] / rates['raw']:.2f}", "≥ 0.85")
  row("tokenising / decoding, time", f"{rates['raw'] / rates['tokens']:.1%}", "≤ 3 %")
  seconds = min(first_batch(source, tokenizer, 20_000) for _ in range(2))
  row("first batch from step 20,000", f"{seconds:.2f} s", "≤ 2 s")


def prepare_rate(directory, repetitions):
  """Rate of `prepare` over that of reading the tar and decoding, 800 x 600 JPEGs, one process."""
  shard = make_shard(directory / "shard.tar", 200)
  work = directory / "work"
  work.mkdir()

  def prepared(max_side):
    options = records.Options(max_side=max_side)
    return timed(200, lambda: records.write(records.TarUnit(str(shard), "train"), 0, work, options))

  rates = measure(
    {
      "raw": lambda: timed(200, lambda: read_and_decode(shard)),
      "256": lambda: prepared(256),
      "none": lambda: prepared(None),
    },
    repetitions,
  )
  row("tar and decoder alone, one process", f"{rates['raw']:,.0f}/s")
  row("prepare --max_side=256 / that", f"{rates['256'] / rates['raw']:.2f}", "≥ 0.8")
  row("prepare --max_side=none / --max_side=256", f"{rates['none'] / rates['256']:.1f}", "≥ 5")


def wait_for_data(name, directory):
  """Milliseconds per step that the training of a ResNet-50 waits for its batch."""
  config = cc.get_config("cross_example_softmax")
  config.steps, config.batch_size, config.log_every = 12, 16, 1
  config.eval_every = config.checkpoint_every = 1_000
  config.data.name, config.data.dir = name, directory
  config.text.pretrained = config.image.pretrained = ""
  config.text.layers, config.text.width, config.text.heads, config.text.mlp = 2, 128, 2, 512
  config.text.warmup_steps = 0
  workdir = pathlib.Path(directory) / "run"
  with contextlib.redirect_stdout(io.StringIO()):
    training.train(config, workdir)
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  steps = [line for line in lines if "data_wait_ms" in line][2:]  # the first two compile
  wait, share = (np.array([s[k] for s in steps]) for k in ("data_wait_ms", "data_wait_share"))
  row("ResNet-50 waits for data, median step", f"{np.median(wait):.1f} ms", "never")
  row("… share of all time", f"{np.mean(share):.1%}")


def pipeline_rate(
  source, tokenizer, augment, clock=time.perf_counter, workers=0, size=224, pictures=None
):
  """Images per second in the steady state: the buffers are full at the start and at the end."""
  config = cc.get_config()
  config.batch_size, config.data.augment, config.image.size = BATCH, augment, size
  config.data.workers = workers
  batches, count = (
    pipeline.train_batches(source, tokenizer, config),
    2 * (pictures or len(source)) // BATCH,
  )
  for _ in range(6):
    next(batches)
  rate = timed(count * BATCH, lambda: [next(batches) for _ in range(count)], clock)
  batches.close()
  return rate


def decode_rate(images):
  data = tf.data.Dataset.from_tensor_slices(images)
  data = data.map(lambda e: tf.io.decode_jpeg(e, channels=3), THREADS)
  data = data.repeat(2).with_options(_two_threads())
  return timed(2 * len(images), lambda: data.reduce(0, lambda n, _: n + 1).numpy())


def first_batch(source, tokenizer, start):
  config = cc.get_config()
  config.batch_size = BATCH
  begin = time.perf_counter()
  next(pipeline.train_batches(source, tokenizer, config, start=start))
  return time.perf_counter() - begin


def read_and_decode(shard):
  with tarfile.open(shard, "r|") as tar:
    for member in tar:
      content = tar.extractfile(member).read()
      if member.name.endswith(".jpg"):
        Image.open(io.BytesIO(content)).load()


def measure(functions, repetitions):
  """The best rate of each function, called in turns."""
  rates = {name: [] for name in functions}
  for _ in range(repetitions):
    for name, function in functions.items():
      rates[name].append(function())
  return {name: max(values) for name, values in rates.items()}


def timed(count, function, clock=time.perf_counter):
  begin = clock()
  function()
  return count / (clock() - begin)


def row(name, value, target=""):
  print(f"{name:48}{value:>12}{target:>10}", flush=True)


def make_data_set(directory, count, height=256, width=256):
  """Prepares `count` images with captions of ten words."""
  random = np.random.default_rng(0)
  (directory / "photos").mkdir(parents=True)
  lines = ["image\tcaption"]
  for n, encoded in enumerate(photos(random, count, height, width)):
    (directory / "photos" / f"{n}.jpg").write_bytes(encoded)
    lines.append(f"{n}.jpg\t{' '.join(random.choice(WORDS, 10))} {n}")
  (directory / "table.tsv").write_text("\n".join(lines))
  job = prepare.table(str(directory / "table.tsv"), str(directory / "photos"), "benchmark")
  shares = (("train", 0.9), ("validation", 0.1))
  prepare.prepare(job, directory, records.Options(max_side=max(height, width), shares=shares))
  return "captions/benchmark"


def make_shard(path, count):
  """A tar in the layout of img2dataset."""
  with tarfile.open(path, "w") as tar:
    for n, encoded in enumerate(photos(np.random.default_rng(1), count, 600, 800)):
      meta = json.dumps({"caption": f"caption {n}", "url": "https://example.com", "key": str(n)})
      for kind, content in (("jpg", encoded), ("txt", b"caption %d" % n), ("json", meta.encode())):
        member = tarfile.TarInfo(f"{n:09d}.{kind}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
  return path


def photos(random, count, height, width):
  """JPEGs with the detail of photos: crops of noise from coarse to fine."""
  large = np.full((height + 256, width + 256, 3), 128, np.float32)
  for octave in range(2, 10):
    noise = random.normal(size=(2**octave, 2**octave, 3)).astype(np.float32)
    for channel in range(3):
      layer = Image.fromarray(noise[..., channel])
      layer = layer.resize((width + 256, height + 256), Image.Resampling.BICUBIC)
      large[..., channel] += np.asarray(layer) * 90 / 1.6**octave
  for _ in range(count):
    y, x = random.integers(0, 256, 2)
    piece = large[y : y + height, x : x + width] + random.normal(0, 5, (height, width, 1))
    out = io.BytesIO()
    Image.fromarray(piece.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    yield out.getvalue()


def _two_threads():
  options = tf.data.Options()
  options.threading.private_threadpool_size = THREADS
  return options


if __name__ == "__main__":
  main()
