"""Parts shared out by Apache Beam: a worker runs the same function as `--part=I/N` does.

A bundle that Beam retries, or runs twice at once, finds what is there and changes nothing. Only
`--runner` imports this: nothing else needs Beam.
"""

import contextlib
import re

import apache_beam as beam
from apache_beam.utils import shared

from xe_retrieval.embed import directory
from xe_retrieval.preparation.beam.settings import Settings, silence


def run(workdir, images, out, part, data_dir, update, runner, options=(), quiet=True) -> None:
  """Returns when all parts are done; ValueError, one sentence, if one of them cannot be."""
  numbers, parts = directory.parse_part(part)
  pipeline = Settings(runner, list(options), quiet).pipeline()
  _ = (
    pipeline
    | "parts" >> beam.Create(numbers)
    | "distribute" >> beam.Reshuffle()  # otherwise one worker would take all
    | "embed" >> beam.ParDo(EmbedPart(workdir, images, out, parts, data_dir, update))
  )
  running = None
  try:
    with silence() if quiet else contextlib.nullcontext():
      running = pipeline.run()
      running.wait_until_finish()
  except KeyboardInterrupt:
    if running is not None:
      running.cancel()
    raise
  except Exception as e:  # the type and the text of what a worker raised are the runner's
    text = f"{type(e).__name__}: {e}"
    found = re.findall(r"(?:ValueError|OSError): (.*?)(?: \[while running.*)?$", text, re.M)
    why = found[-1] if found else f"--runner={runner} has stopped: {text.splitlines()[-1][:300]}"
    raise ValueError(why) from e


class EmbedPart(beam.DoFn):
  """Numbers of parts in; nothing out, the result is in files."""

  def __init__(self, workdir, images, out, parts, data_dir, update):
    self._given = workdir, images, data_dir
    self._out, self._parts, self._update = out, parts, update
    self._shared = shared.Shared()  # one model for all threads of a process

  def setup(self):
    self._opened = self._shared.acquire(lambda: Opened(*self._given))

  def process(self, number):
    from xe_retrieval.embed import part

    opened = self._opened
    part.run(opened.model, opened.source, self._out, number, self._parts, self._update)


class Opened:
  """The model and the source on a worker."""

  def __init__(self, workdir, images, data_dir):
    import xe_retrieval
    from xe_retrieval.search import image_sources

    self.model = xe_retrieval.load(workdir)
    self.source = image_sources.parse(images, data_dir or self.model.config.data.dir)
