"""Administration: backups of the store, certificates, tokens, checkpoints. Works on files only.

In: paths of a store, of certificates, of a token file or of checkpoints. Out: new or renewed files,
and lists as table or JSON. `ca` is the certificate authority behind `certs`, `checkpoint_text` the
output of `checkpoint`. Needs no controller; a running controller rereads changed files.
"""
