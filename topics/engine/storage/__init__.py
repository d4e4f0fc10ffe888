"""File formats: log, frames, segments, snapshots, manifests. Encoding, decoding, and safe ways to write them."""
