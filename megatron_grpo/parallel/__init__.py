"""Process groups, collectives and the byte ledger: with ``backends``, the only users of torch.distributed."""
