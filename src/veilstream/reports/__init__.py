"""What people look at: comparisons and figures."""
