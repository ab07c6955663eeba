"""Thumbnails of pictures of every kind."""

import io
import threading

import numpy as np
import pytest
from PIL import Image

from xe_retrieval.serving import thumbnails


def picture(mode, size=(40, 20), **kwargs):
  """The file of a picture: dark on the left, light on the right."""
  ramp = np.tile(np.linspace(0, 255, size[0]).astype(np.uint8), (size[1], 1))
  out = io.BytesIO()
  Image.fromarray(ramp).convert(mode).save(out, **({"format": "PNG"} | kwargs))
  return out.getvalue()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_is_shown(mode):
  content, kind = thumbnails.make(picture(mode), 10)
  shown = Image.open(io.BytesIO(content)).convert("L")
  assert kind == "image/png" and shown.size == (10, 5)
  assert np.asarray(shown)[:, 0].max() < 64 and np.asarray(shown)[:, -1].min() > 190


def test_turned_as_the_camera_was():
  turned = Image.Exif()
  turned[0x0112] = 6  # to be turned by 90° clockwise
  content, _ = thumbnails.make(picture("RGB", format="JPEG", exif=turned), 10)
  shown = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
  assert shown.shape == (10, 5) and shown[0].max() < 64 and shown[-1].min() > 190


def test_large_pictures_are_decoded_one_at_a_time(monkeypatch):
  monkeypatch.setattr(thumbnails, "_LARGE", 700)
  made = threading.Event()
  waiting = threading.Thread(target=lambda: thumbnails.make(picture("RGB"), 10) and made.set())
  with thumbnails._one_large:
    thumbnails.make(picture("RGB", (20, 20)), 10)  # not large: does not wait
    waiting.start()
    assert not made.wait(0.2)
  waiting.join(30)
  assert made.is_set()
