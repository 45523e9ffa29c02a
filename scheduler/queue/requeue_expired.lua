-- Give back what has an expired lease. ARGV: now_ms. Returns the ids moved, by expiry.
return give_back_all(redis.call('ZRANGEBYSCORE', LEASES, '-inf', ARGV[1]))
