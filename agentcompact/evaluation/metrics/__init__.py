"""What is measured of a compacted cache, each kind in a file of its own."""
