"""What one request and all of them together may take; /api/about tells clients."""

LIMITS = {
  "query": 500,  # characters
  "batch": 64,  # queries per request
  "top": 200,
  "offset": 1_000_000,
  "export": 100_000,  # rows
  "waiting": 256,  # queued queries; also thumbnails being made
  "pictures": 32,  # queued
  "active": 1_024,  # requests being answered
  "address": 8_192,  # bytes
  "headers": 32_768,
  "body": 262_144,
  "picture": 16 << 20,
}
