-- Store results of a batch's lines and add them to the counts in the record. If a line already has a result, its new
-- result is ignored.
-- KEYS: record, results, owner lock.
-- ARGV: owner's token, then seven values for each result: line number, 1 (succeeded) or 0 (failed), input tokens,
--       cached tokens, output tokens, reasoning tokens, text.
-- Returns the number of new results, or -1 if the caller does not own the batch.
local record, results, owner = unpack(KEYS)

if redis.call('GET', owner) ~= ARGV[1] then
  return -1
end

-- sums[1] is the number of new failures, sums[2] the number of new successes. sums[3] to sums[6] are the sums of the
-- token counts of the new results.
local fields = {'failed', 'completed', 'input_tokens', 'cached_tokens', 'output_tokens', 'reasoning_tokens'}
local sums = {0, 0, 0, 0, 0, 0}
local new = 0
for i = 2, #ARGV, 7 do
  local line, succeeded, text = ARGV[i], ARGV[i + 1], ARGV[i + 6]
  if redis.call('HSETNX', results, line, succeeded .. text) == 1 then
    new = new + 1
    local outcome = tonumber(succeeded) + 1
    sums[outcome] = sums[outcome] + 1
    for j = 3, 6 do
      sums[j] = sums[j] + ARGV[i + j - 1]
    end
  end
end
for j, field in ipairs(fields) do
  if sums[j] ~= 0 then
    redis.call('HINCRBY', record, field, string.format('%d', sums[j]))
  end
end
return new
