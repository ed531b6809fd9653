"""Controller: state machine."""
