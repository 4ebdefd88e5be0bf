"""The processes that run one engine each; no module here imports another, and only one imports pagelet."""
