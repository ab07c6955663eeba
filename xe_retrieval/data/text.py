"""Captions → WordPiece ids."""

import collections
import hashlib
import os

import numpy as np

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # [PAD] is 0: the towers mask zeros


class Tokenizer:
  """Strings → int32 [n, tokens], zero-padded, [CLS] first, cut at `tokens`."""

  def __init__(self, fast, tokens: int):
    if fast.pad_token_id != 0:
      raise ValueError(f"the tokenizer pads with id {fast.pad_token_id}; the text tower masks id 0")
    self._fast, self.tokens, self.vocab_size = fast, tokens, len(fast)
    fast.backend_tokenizer.enable_truncation(tokens)
    fast.backend_tokenizer.enable_padding(length=tokens, pad_id=0, pad_token=fast.pad_token)

  def __call__(self, captions: list[str]) -> np.ndarray:
    encoded = self._fast.backend_tokenizer.encode_batch_fast(captions)  # no offsets into the text
    return np.array([e.ids for e in encoded], np.int32).reshape(len(captions), self.tokens)

  def fingerprint(self) -> str:
    """A hash of all that decides which ids a caption gets."""
    state = f"{self.tokens} {self._fast.backend_tokenizer.to_str()}"
    return hashlib.sha256(state.encode()).hexdigest()

  def save(self, directory) -> None:
    self._fast.save_pretrained(directory)


def load(path: str, tokens: int) -> Tokenizer:
  """The tokenizer of a pretrained tower: a directory or a Hugging Face id."""
  import transformers

  try:
    return Tokenizer(transformers.AutoTokenizer.from_pretrained(path), tokens)
  except (OSError, ValueError) as e:
    raise ValueError(f"no tokenizer in {str(path)!r} (tokenizer.json or vocab.txt): {e}") from e


def train(captions: list[str], vocab_size: int, tokens: int) -> Tokenizer:
  """A lower-case WordPiece vocabulary: the commonest words, and letters to spell the others.

  (The trainer in `tokenizers` gives another vocabulary on every run; this one is reproducible.)
  """
  import tokenizers
  import transformers

  pieces = tokenizers.BertWordPieceTokenizer(lowercase=True)
  words = collections.Counter()
  for caption in captions:
    clean = pieces.normalizer.normalize_str(caption)
    words.update(word for word, _ in pieces.pre_tokenizer.pre_tokenize_str(clean))
  letters = sorted(set("".join(words)))
  spelling = _SPECIAL + letters + [f"##{letter}" for letter in letters]
  known = set(spelling)
  common = sorted((w for w in words if w not in known), key=lambda w: (-words[w], w))
  vocab = (spelling + common)[:vocab_size]
  fast = transformers.BertTokenizerFast(vocab={piece: i for i, piece in enumerate(vocab)})
  return Tokenizer(fast, tokens)
