"""Jobs at their times: what a schedule's file says, when a job is due, and the process that runs them."""
