"""What README and docs show of the results: tables, and the figures that sentences quote."""
