"""TPU kernels of other projects compiled beside ours, without a TPU (`scripts.peers.compare`)."""
