"""Constants of robust statistics, for normal errors. Pure."""

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation
MEDIAN_ERROR = 1.2533  # standard error of a median, in those of a mean
HUBER_K = 1.345  # Huber's bend with 95 % efficiency
