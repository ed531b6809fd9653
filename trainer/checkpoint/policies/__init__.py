"""What is saved when: the interval, partial checkpoints of experts, windows of sparse steps."""
