"""What a simulated job does about failures: pacekeeper's policy and those of published systems."""
