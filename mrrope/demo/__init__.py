"""What ``mrrope demo`` shows: a real model that reads on past its native length, by one method and another."""
