// Memory of a thread for intermediate numbers.

#pragma once

#include "numbers.h"
#include <new>

namespace tidegate {

// Memory for numbers of a type without constructors. It is kept from call to call and only grows, since fresh memory
// pages would take 8 % of a long prefill's time.
template <typename T> class Buffer {
  public:
    Buffer() = default;
    ~Buffer() { release(); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    T *of(Index n) {
        if (n > size) {
            release();
            numbers = new (std::align_val_t(64)) T[n];
            size = n;
        }
        return numbers;
    }

  private:
    void release() { ::operator delete[](numbers, std::align_val_t(64)); }
    T *numbers = nullptr;
    Index size = 0;
};

}  // namespace tidegate
