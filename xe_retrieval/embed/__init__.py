"""Embedding a collection in parts, anywhere: each part is a pure function of its pictures.

OUT/embedding.json             model, source and number of parts; written by the first worker
OUT/00003-of-00064/            of part 3:
  000000-1f2e3d4c.parquet        a chunk of pictures: id, name, vector, stamp_size, stamp_time
  skipped-5a6b7c8d.jsonl         files that are no pictures, and why
OUT/00003-of-00064.json        written last: the part is done, and these are its files

The part of a picture is a hash of its name, so that workers agree without talking to each other.
No file is ever written over: a worker that is killed, started twice or late harms nothing.
"""
