"""Policies of pipelined jobs: pacekeeper, ResiHP, Greyhound, Adaptra, ReCycle, Oobleck, none."""
