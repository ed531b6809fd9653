"""Layouts of fewer or more ranks: what survivors of a death and newcomers agree on."""
