#include "common/model/sites.h"

#include <mutex>
#include <set>

namespace flashsteps::model {
namespace {
std::mutex mutex;
bool recording = false;
std::set<Site> recorded;
std::optional<Site> skip;
}  // namespace

bool note_site(SiteKind kind, const char* file, int line) {
  if (recording) {
    std::lock_guard lock(mutex);
    recorded.insert({file, line, kind});
  }
  return skip && skip->line == line && skip->kind == kind && skip->file == file;
}

void record_sites(bool on) {
  if (on) recorded.clear();
  recording = on;
  sites_matter = recording || skip;
}

std::vector<Site> sites() {
  return {recorded.begin(), recorded.end()};
}

void skip_site(std::optional<Site> site) {
  skip = std::move(site);
  sites_matter = recording || skip;
}

const char* to_string(SiteKind kind) {
  switch (kind) {
    case SiteKind::barrier:
      return "barrier";
    case SiteKind::warp_barrier:
      return "warp barrier";
    case SiteKind::shuffle:
      return "shuffle";
    case SiteKind::copy:
      return "copy";
    case SiteKind::commit:
      return "commit";
    case SiteKind::wait:
      return "wait";
    case SiteKind::ldmatrix:
      return "ldmatrix";
    case SiteKind::mma:
      return "mma";
    case SiteKind::mask:
      return "mask";
    case SiteKind::exp:
      return "exp";
    case SiteKind::div:
      return "div";
    case SiteKind::atomic:
      return "atomic";
    case SiteKind::turn:
      return "turn";
    case SiteKind::mbarrier_init:
      return "mbarrier init";
    case SiteKind::arrive:
      return "arrive";
    case SiteKind::expect:
      return "expect";
    case SiteKind::named_barrier:
      return "named barrier";
    case SiteKind::fence:
      return "fence";
    case SiteKind::store:
      return "store";
    case SiteKind::wgmma:
      return "wgmma";
    case SiteKind::registers:
      return "registers";
  }
  return "?";
}

}  // namespace flashsteps::model
