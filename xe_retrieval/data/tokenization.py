"""Captions → ids of word pieces: WordPiece, BPE or SentencePiece."""

import collections
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterable

import numpy as np
import tokenizers
from etils import epath

from xe_retrieval import config as config_lib
from xe_retrieval.data import paths

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # [PAD] is 0: the towers mask zeros
_CACHED_WORDS = 200_000  # at most; then the cache starts again


class Tokenizer:
  """Strings → int32 [n, tokens], special tokens around them, padded with `pad` or truncated."""

  def __init__(self, tokenizer, tokens: int, fixed: bool = False):
    self._whole, self.tokens, self.vocab_size = tokenizer, tokens, len(tokenizer)
    self.each = [self]  # as SideBySide has it
    self.pad = tokenizer.pad_token_id or 0
    self._fixed = fixed  # padding counts: texts are never cut to their length
    self._pieces = getattr(tokenizer, "backend_tokenizer", None)
    if self._pieces is None:  # SentencePiece in Python
      self.end = tokenizer.eos_token_id
      return
    self._pieces.no_padding()
    self._pieces.no_truncation()
    sample = self._pieces.encode("a")
    ids, special = np.array(sample.ids), np.array(sample.special_tokens_mask, bool)
    content = np.flatnonzero(~special)
    self._first, self._last = list(ids[: content[0]]), list(ids[content[-1] + 1 :])
    self.end = int(ids[-1])
    # BERT's pre-tokenizer splits at every space: the ids of a word can be cached.
    self._by_word = isinstance(
      self._pieces.pre_tokenizer, tokenizers.pre_tokenizers.BertPreTokenizer
    )
    self._cache = {}

  def __call__(self, captions: list[str]) -> np.ndarray:
    if self._pieces is None:
      room = {"padding": "max_length", "truncation": True, "max_length": self.tokens}
      ids = self._whole(list(captions), **room)["input_ids"] if len(captions) else []
      return np.array(ids, np.int32).reshape(len(captions), self.tokens)
    split = [caption.split(" ") if self._by_word else [caption] for caption in captions]
    known = self._cache = self._cache if len(self._cache) < _CACHED_WORDS else {}
    new = list(set().union(*split).difference(known))
    encoded = self._pieces.encode_batch_fast(new, add_special_tokens=False)
    known.update((word, pieces.ids) for word, pieces in zip(new, encoded, strict=True))
    out = np.full((len(captions), self.tokens), self.pad, np.int32)
    room = self.tokens - len(self._first) - len(self._last)
    for row, words in zip(out, split, strict=True):
      ids = [*self._first, *[i for word in words for i in known[word]][:room], *self._last]
      row[: len(ids)] = ids
    return out

  def __getstate__(self):
    """For worker processes, which do not save it: importing transformers takes seconds."""
    return self.__dict__ | ({"_whole": None, "_cache": {}} if self._pieces is not None else {})

  def lengths(self, ids: np.ndarray) -> np.ndarray:
    """int32 [n, T] → int [n]: how many ids of each text the tower needs."""
    width = ids.shape[1]
    if self._fixed:
      return np.full(len(ids), width)
    known = ids != self.pad
    found = np.where(known.any(1), width - np.argmax(known[:, ::-1], axis=1), 0)
    return np.minimum(found + (self.end == self.pad), width)  # CLIP pads with its end of text

  def fingerprint(self) -> str:
    """A hash of all that determines the ids of a caption; part of the key of cached features."""
    if self._pieces is None:
      about = f"{type(self._whole).__name__} {sorted(self._whole.get_vocab().items())}"
    else:
      about = self._pieces.to_str()
    return hashlib.sha256(f"{self.tokens} {about}".encode()).hexdigest()

  def save(self, directory) -> None:
    if not paths.is_remote(directory):
      self._whole.save_pretrained(directory)
      return
    with tempfile.TemporaryDirectory() as scratch:
      self._whole.save_pretrained(scratch)
      epath.Path(directory).mkdir(parents=True, exist_ok=True)
      for file in epath.Path(scratch).iterdir():
        (epath.Path(directory) / file.name).write_bytes(file.read_bytes())


class SideBySide:
  """The tokenizers of several text towers: the ids of each, one after the other."""

  def __init__(self, each: list[Tokenizer]):
    self.each, self.tokens = each, sum(one.tokens for one in each)
    self.vocab_size = min(one.vocab_size for one in each)  # below it, ids are those of all

  def __call__(self, captions: list[str]) -> np.ndarray:  # -> int32 [n, tokens]
    return np.concatenate([one(captions) for one in self.each], axis=1)

  def fingerprint(self) -> str:
    return " ".join(one.fingerprint() for one in self.each)

  def save(self, directory) -> None:
    """A directory for each, as `load` finds them."""
    for i, one in enumerate(self.each):
      one.save(directory / config_lib.tower_name(i))


def spans(text) -> list[tuple[int, int]]:
  """Where the ids of each tower of config.text begin and end in a row of ids."""
  ends = list(itertools.accumulate(one.tokens for one in config_lib.towers(text).values()))
  return list(zip([0, *ends], ends, strict=False))


def load(path, text) -> Tokenizer | SideBySide:
  """What `save` wrote to a directory, local or remote, for the towers of config.text."""
  if "towers" not in text:
    return of_tower(path, text)
  return SideBySide([of_tower(path / name, one) for name, one in config_lib.towers(text).items()])


def of_tower(path, text) -> Tokenizer:
  """The tokenizer of a pretrained tower: a directory, local or remote, or a Hugging Face id.

  `text` is config.text: how many tokens, which id is padding (-1: any) and whether it is pooled.
  """
  import transformers

  if paths.is_remote(path):
    with tempfile.TemporaryDirectory() as scratch:
      for file in epath.Path(path).iterdir():
        (epath.Path(scratch) / file.name).write_bytes(file.read_bytes())
      return of_tower(scratch, text)
  try:
    whole = transformers.AutoTokenizer.from_pretrained(path)
  except (OSError, ValueError, ImportError) as e:
    files = "tokenizer.json, vocab.txt, merges.txt or spiece.model"
    raise ValueError(f"no tokenizer in {str(path)!r} ({files}): {e}") from e
  tokenizer = Tokenizer(whole, text.tokens, text.get("pooling") == "last")
  masked = text.get("pad", 0)
  if masked not in (-1, tokenizer.pad):
    raise ValueError(
      f"the tokenizer pads with id {tokenizer.pad}; the text tower masks id {masked}"
    )
  return tokenizer


def train(captions: Iterable[str], vocab_size: int, tokens: int) -> Tokenizer:
  """A lower-case WordPiece vocabulary: the most frequent words, and letters to spell the others.

  (The trainer in `tokenizers` is not deterministic.)
  """
  import transformers

  pieces = tokenizers.BertWordPieceTokenizer(lowercase=True)
  counted, words = collections.Counter(), collections.Counter()
  captions = iter(captions)
  while some := list(itertools.islice(captions, 4096)):
    # Split as in `Tokenizer`: each part needs normalising only once.
    counted.update(" ".join(some).split(" "))
  for part, count in counted.items():
    clean = pieces.normalizer.normalize_str(part)
    for word, _ in pieces.pre_tokenizer.pre_tokenize_str(clean):
      words[word] += count
  letters = sorted(set("".join(words)))
  spelling = _SPECIAL + letters + [f"##{letter}" for letter in letters]
  known = set(spelling)
  common = sorted((w for w in words if w not in known), key=lambda w: (-words[w], w))
  vocab = (spelling + common)[:vocab_size]
  fast = transformers.BertTokenizerFast(vocab={piece: i for i, piece in enumerate(vocab)})
  return Tokenizer(fast, tokens)
