// How a pump's reads move: one interface, two transports (io_uring and preadv threads).
//
// Everything here is called by one thread, the pump's, except construction, which happens before
// that thread exists, and reason(), which may be called from anywhere. A reader never loses a read:
// each pushed read comes back from reap() exactly once, with the bytes read or a negative errno.
//
// Fault model: a device may answer with any errno, with fewer bytes, late, or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tierd {

inline constexpr std::uint32_t kDevicesMax = 256;
inline constexpr std::uint32_t kQueueDepthMax = 4096;
inline constexpr std::uint32_t kReadThreadsMax = 256;

// An arena is registered in chunks: the kernel takes 1 GiB at most per fixed buffer, and pinning a
// whole arena at once would stop the pump for longer than a guardian waits before it takes over.
inline constexpr std::uint32_t kChunkShift = 14;  // 16,384 pages, 64 MiB
inline constexpr std::uint32_t kChunkPages = 1u << kChunkShift;
inline constexpr std::uint32_t kBuffersMax = 16384;  // the kernel's limit on fixed buffers
inline constexpr std::int32_t kNoBuffer = -1;

// One page to read. Everything is resolved: the reader only moves bytes.
struct Read {
    std::uint8_t* target;  // 4,096 bytes, page aligned
    std::uint64_t offset;  // on the device, in bytes
    std::uint32_t device;
    std::int32_t buffer;  // the fixed buffer that holds target, or kNoBuffer
    std::uint32_t token;  // given back by reap()
};

struct ReadDone {
    std::uint32_t token;
    std::int32_t result;  // bytes, or -errno
};

class Reader {
  public:
    virtual ~Reader() = default;
    Reader() = default;
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    virtual const char* name() const = 0;
    // "" or one line per thing that is not as good as it could be, joined with "; ".
    virtual std::string reason() const = 0;

    // Called by the pump's thread before its first and after its last other call.
    virtual void begin() = 0;
    virtual void end() = 0;

    // `fd` stays the caller's; it is valid until remove_device. No read of a device is in flight
    // when it is removed.
    virtual void add_device(std::uint32_t device, int fd) = 0;
    virtual void remove_device(std::uint32_t device) = 0;

    // Fixed buffers: the first of `count` consecutive ones, or kNoBuffer where the transport has
    // none. register_buffer() is false (and reason() says why) when the kernel refuses.
    virtual std::int32_t reserve_buffers(std::uint32_t count) = 0;
    virtual bool register_buffer(std::int32_t buffer, std::uint8_t* base, std::uint64_t bytes) = 0;
    virtual void release_buffers(std::int32_t first, std::uint32_t count) = 0;

    // Takes the reads over; the caller keeps at most queue_depth in flight. They start at the
    // latest with the next submit() or wait().
    virtual void push(const Read* reads, std::size_t count) = 0;
    virtual void submit() = 0;
    // Finished reads, never blocking; at most `room` of them.
    virtual std::size_t reap(ReadDone* done, std::size_t room) = 0;
    // Submits, then sleeps until `count` (>= 1) reads have finished, the pump's eventfd was rung, or
    // the time is over. It may return early.
    virtual void wait(std::uint32_t count, std::uint64_t timeout_ns) = 0;
    // How often the eventfd has ended a wait.
    virtual std::uint64_t wakes() const = 0;
};

struct ReaderOptions {
    std::uint32_t queue_depth;
    std::uint32_t read_threads;
    int wake_fd;  // the pump's eventfd
};

// Null, with `reason` set to one line, when the kernel refuses io_uring to this process.
std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options, std::string& reason);
// `reason` is what reason() will say: why io_uring is not used, or "" when nobody asked for it.
std::unique_ptr<Reader> make_thread_reader(const ReaderOptions& options, std::string reason);

// Empties an eventfd without ever blocking, whatever flags another holder of it has set.
void drain_eventfd(int fd);
void ring_eventfd(int fd);

// An errno of the I/O path that only a programming fault can cause: says so and aborts, because a
// pump that cannot submit would leave every client waiting.
[[noreturn]] void reader_fault(const char* call, int error);

}  // namespace tierd
