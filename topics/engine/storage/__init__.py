"""File formats: log, frames, segments, snapshots, manifests; encoding, decoding and crash-safe writing."""
