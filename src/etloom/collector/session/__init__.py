"""The recorder inside the job's processes: schedule, windows, profilers and the files they write."""
