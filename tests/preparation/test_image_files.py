"""Every image format becomes one that the pipeline decodes, or is rejected with a reason."""

import io
import re
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from xe_retrieval.data import decoding
from xe_retrieval.preparation import image_files, near_duplicates
from xe_retrieval.preparation.rejections import Rejected

LIMIT = 1_000_000


def gradient(width=60, height=40):
  y, x = np.mgrid[:height, :width]
  return Image.fromarray(np.stack([x * 4, y * 6, 255 - x * 4], -1).astype(np.uint8))


def encoded(image, kind, **options):
  out = io.BytesIO()
  image.save(out, kind, **options)
  return out.getvalue()


def decoded(data, size=40):
  return decoding.decode(data, decoding.centres([data])[0], size)


GRADIENT = np.asarray(gradient().crop((10, 0, 50, 40)), int)
FRAMES = [gradient(), ImageOps.mirror(gradient())]
ROTATED = Image.Exif()
ROTATED[0x0112] = 6  # to be rotated by 90 degrees clockwise
KINDS = {
  "jpeg": encoded(gradient(), "JPEG", quality=95),
  "progressive": encoded(gradient(), "JPEG", quality=95, progressive=True),
  "cmyk": encoded(gradient().convert("CMYK"), "JPEG", quality=95),
  "png": encoded(gradient(), "PNG"),
  "palette": encoded(gradient().quantize(256), "PNG"),
  "alpha": encoded(gradient().convert("RGBA"), "PNG"),
  "webp": encoded(gradient(), "WEBP", quality=95),
  "animated webp": encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:], quality=95),
  "animated gif": encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
  "bmp": encoded(gradient(), "BMP"),
  "tiff": encoded(gradient(), "TIFF"),
  "rotated": encoded(
    gradient().transpose(Image.Transpose.ROTATE_90), "JPEG", exif=ROTATED, quality=95
  ),
}


@pytest.mark.parametrize("max_side", [384, None])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_shows_the_same_image(kind, max_side):
  data, _ = image_files.check(KINDS[kind], max_side, LIMIT)
  assert np.abs(decoded(data) - GRADIENT).mean() < 12
  if kind in ("jpeg", "progressive"):
    assert data == KINDS[kind]


def test_sixteen_bits_grey_and_transparency():
  grey = (np.mgrid[:40, :60][1] * 1000).astype(np.uint16)
  data, _ = image_files.check(encoded(Image.fromarray(grey), "PNG"), 384, LIMIT)
  np.testing.assert_allclose(decoded(data)[20, :, 0], grey[20, 10:50] / 257, atol=4)
  clear = gradient().convert("RGBA")
  clear.putalpha(0)
  data, _ = image_files.check(encoded(clear, "PNG"), 384, LIMIT)
  assert (decoded(data) > 250).all()  # on white
  assert (decoding.square(encoded(clear, "PNG"), view=20) == 255).all()  # also where it is searched
  palette = encoded(clear.convert("P"), "PNG", transparency=0)
  assert decoding.square(palette, view=20).min() > 250


@pytest.mark.parametrize("max_side", [384, None])
@pytest.mark.parametrize("kind", ["jpeg", "progressive", "png", "webp", "animated gif", "tiff"])
def test_half_a_file_is_rejected(kind, max_side):
  with pytest.raises(Rejected) as rejected:
    image_files.check(KINDS[kind][: len(KINDS[kind]) // 2], max_side, LIMIT)
  assert rejected.value.reason in ("truncated", "not an image")


@pytest.mark.parametrize(
  ("data", "reason"),
  [
    (b"", "not an image"),
    (b"<html>404</html>", "not an image"),
    (b"\xff\xd8\xff\xd9", "not an image"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),  # would start an interpreter
    (
      KINDS["png"].replace(b"\0\0\0\rIHDR", b"\0\0\0\5IHDR"),
      "truncated",
    ),  # Pillow raises ValueError
    (
      re.sub(b"....IDAT", b"\0\0\0\x10IDAT", KINDS["png"], flags=re.S),
      "not an image",
    ),  # a SyntaxError
    (encoded(Image.new("1", (2000, 2000)), "PNG"), "over the pixel limit"),
    (encoded(Image.new("L", (1001, 1001)), "JPEG"), "over the pixel limit"),
  ],
)
def test_rejected_with_a_reason(data, reason):
  with pytest.raises(Rejected) as rejected:
    image_files.check(data, 384, LIMIT)
  assert rejected.value.reason == reason and rejected.value.detail


def test_a_decompression_bomb_is_rejected_by_its_header():
  size = 60_000
  head = size.to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"
  chunk = lambda name, body: (  # noqa: E731
    len(body).to_bytes(4) + name + body + zlib.crc32(name + body).to_bytes(4)
  )
  pixels = zlib.compress(bytes(10_000_000))
  bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
  with pytest.raises(Rejected) as rejected:
    image_files.check(bomb, 384, 10**12)  # Pillow's own limit applies, too
  assert rejected.value.reason == "over the pixel limit"


@pytest.mark.parametrize("max_side", [384, None])
def test_a_jpeg_of_ten_thousand_scans_is_not_decoded(max_side):
  data = encoded(Image.new("L", (1000, 1000)), "JPEG", progressive=True)
  last = data.rindex(b"\xff\xda")
  bomb = data[:last] + data[last:-2] * 10_000 + data[-2:]
  with pytest.raises(Rejected) as rejected:
    image_files.check(bomb, max_side, LIMIT)
  assert rejected.value.reason == "over the pixel limit" and "10,0" in rejected.value.detail


def test_fingerprints_survive_resizing_and_compression_only():
  random = np.random.default_rng(0)
  coarse = random.integers(0, 255, (30, 7, 7, 3), np.uint8)
  originals = [Image.fromarray(c).resize((200, 160), Image.Resampling.BICUBIC) for c in coarse]
  copies = [
    Image.open(io.BytesIO(encoded(o.resize((150, 120)), "JPEG", quality=50))) for o in originals
  ]
  a, b = (
    np.frombuffer(b"".join(map(image_files.fingerprint, many)), np.uint8).reshape(-1, 16)
    for many in (originals, copies)
  )
  found = near_duplicates.find(a, b)
  np.testing.assert_array_equal(found[:, 0], np.arange(30))
  np.testing.assert_array_equal(found[:, 1], np.arange(30))
  assert len(near_duplicates.find(a[:15], b[15:])) == 0


@pytest.mark.parametrize("flat", [0, 10])  # bytes that nearly all pictures have in common
def test_near_duplicates_against_all_pairs(monkeypatch, flat):
  monkeypatch.setattr(near_duplicates, "_BLOCK", (64, 90))
  random = np.random.default_rng(1)
  b = random.integers(0, 256, (300, 16), np.uint8)
  b[:280, :flat] = 0
  flips = np.zeros((200, 128), np.uint8)
  for row, count in zip(flips, random.integers(0, 14, 200), strict=True):
    row[random.permutation(128)[:count]] = 1
  a = b[random.integers(0, 300, 200)] ^ np.packbits(flips, axis=1)
  bits = np.bitwise_count(a[:, None] ^ b[None]).sum(-1)
  near = np.flatnonzero(bits.min(1) <= near_duplicates.DISTANCE)
  expected = np.stack([near, bits[near].argmin(1), bits[near].min(1)], 1)
  np.testing.assert_array_equal(near_duplicates.find(a, b), expected)
  assert 50 < len(expected) < 150
