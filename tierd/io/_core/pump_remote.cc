// The control path of remote tables. See pump.h and reader_remote.h.
#include <algorithm>
#include <stdexcept>

#include "pump.h"

namespace tierd {
namespace {

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

void check_places(const std::vector<RemotePlace>& places) {
    require(!places.empty(), "places: none given");
    std::uint64_t next = 0;
    for (const RemotePlace& place : places) {
        require(place.first_page == next && place.pages != 0, "places: sorted and without holes");
        next += place.pages;
    }
}

}  // namespace

std::uint32_t Pump::free_device() const {
    const auto free = std::find_if(devices_.begin(), devices_.end(),
                                   [](const Device& device) { return !device.used(); });
    require(free != devices_.end(), "device: all 256 are in use");
    return static_cast<std::uint32_t>(free - devices_.begin());
}

std::uint32_t Pump::add_remote() {
    const std::lock_guard control(control_mutex_);
    check_running_or_fresh();
    require(remote_ != nullptr, "this pump was made without remote tables");
    const std::uint32_t device = free_device();
    devices_[device] = {-1, 0, true};
    call([&] {
        device_counts_[device] = {device, 0, 0, 0, {}};
        remote_->add_remote(device);
        return Progress::finished;
    });
    return device;
}

bool Pump::link_remote(
    const std::shared_ptr<RemoteLink>& link,
    const std::vector<std::pair<std::uint32_t, std::vector<RemotePlace>>>& devices) {
    std::vector<std::shared_ptr<RemoteLink>> ended;  // gone after the lock is given back
    const std::lock_guard control(control_mutex_);
    check_running_or_fresh();
    require(remote_ != nullptr, "this pump was made without remote tables");
    for (const auto& [device, places] : devices) {
        require(device < kDevicesMax && devices_[device].remote, "there is no such remote device");
        check_places(places);
        // A page is never looked for behind the last place.
        const std::uint64_t pages = places.back().first_page + places.back().pages;
        for (const auto& [number, table] : tables_)
            require(!table->uses(device) || table->geometry.pages <= pages,
                    "places: fewer pages than the table has");
    }
    std::int32_t next_buffer = 0;
    call([&] {
        if (!remote_->join(link, next_buffer)) return Progress::more;
        ended = take_ended_links();
        for (const auto& [device, places] : devices) remote_->attach(device, *link, places);
        return Progress::finished;
    });
    return link->up();
}

std::vector<std::shared_ptr<RemoteLink>> Pump::take_ended_links() {
    return remote_ == nullptr ? std::vector<std::shared_ptr<RemoteLink>>{} : remote_->take_ended();
}

void Pump::drop_link(const std::shared_ptr<RemoteLink>& link, const std::string& why) {
    std::vector<std::shared_ptr<RemoteLink>> ended;  // gone after the lock is given back
    const std::lock_guard control(control_mutex_);
    call([&] {
        link->fail(why);
        ended = take_ended_links();
        return Progress::finished;
    });
}

}  // namespace tierd
