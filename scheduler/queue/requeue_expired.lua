-- Move requests with expired leases back to their tiers. ARGV: now_ms. Returns their ids, sorted by expiry.
return give_back_all(redis.call('ZRANGEBYSCORE', LEASES, '-inf', ARGV[1]))
