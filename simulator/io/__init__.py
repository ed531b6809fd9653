"""Opens text files and tables of other tools: plain, gzipped or Parquet, with bounded size."""
