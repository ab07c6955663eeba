"""Parts shared out by Apache Beam: a worker runs the same function as `--part=I/N` does.

A bundle that Beam retries, or runs twice at once, finds what is there and changes nothing. Only
`--runner` imports this: nothing else needs Beam.
"""

import logging
import re

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, WorkerOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.utils import shared

from xe_retrieval.embed import directory

RUNNERS = ("DirectRunner", "DataflowRunner", "FlinkRunner", "SparkRunner")


def run(workdir, images, out, part, data_dir, update, runner, options=()) -> None:
  """Returns when all parts are done; ValueError, one sentence, if one of them cannot be."""
  if runner not in RUNNERS:
    raise ValueError(f"--runner={runner} should be one of {', '.join(RUNNERS)}")
  numbers, parts = directory.parse_part(part)
  options = PipelineOptions(list(options))
  worker = options.view_as(WorkerOptions)
  worker.default_sdk_harness_log_level = worker.default_sdk_harness_log_level or "ERROR"
  logging.getLogger("apache_beam").setLevel(logging.CRITICAL)  # one sentence says what it was
  # What DirectRunner itself ends up with where it cannot download Prism, which it tries first.
  chosen = FnApiRunner() if runner == "DirectRunner" else runner
  pipeline = beam.Pipeline(chosen, options)
  _ = (
    pipeline
    | beam.Create(numbers)
    | beam.Reshuffle()  # otherwise one worker would take all parts
    | beam.ParDo(EmbedPart(workdir, images, out, parts, data_dir, update))
  )
  try:
    pipeline.run().wait_until_finish()
  except Exception as e:  # the types and the text of what a worker raised are the runner's
    found = re.findall(r"(?:ValueError|OSError): (.*?)(?: \[while running.*)?$", _text(e), re.M)
    raise ValueError(found[-1] if found else _text(e).splitlines()[-1]) from e


def _text(error):
  return f"{type(error).__name__}: {error}"


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
