"""What should this have taken, and what is wrong? Pure functions of plain values."""
